"""The device fixture: every test of the grouped GEMM runs on the host engine, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch


def _has_wgmma() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cuda" and not _has_wgmma():
        pytest.skip("needs a GPU of compute capability 9.0")
    return torch.device(request.param)


@pytest.fixture
def hopper() -> torch.device:
    if not _has_wgmma():
        pytest.skip("needs a GPU of compute capability 9.0")
    return torch.device("cuda")
