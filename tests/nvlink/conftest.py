"""The back end over NVLink without a GPU: sessions that launch nothing, and the emulated machine."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import emulated
import pytest
from scaled_calls import FakeSession

from moe_tk.ops import cuda_functional, cuda_scaled_dense


@pytest.fixture
def sessions(monkeypatch):
    """Sessions of the calls made, on a machine that may have no GPU."""
    made = []

    def session(op, geometry, *, timeout_s):
        made.append(FakeSession(geometry))
        return made[-1]

    held = SimpleNamespace(session=session, stream=lambda: SimpleNamespace(cuda_stream=0))
    for module in (cuda_functional, cuda_scaled_dense):
        monkeypatch.setattr(module, "one_call", lambda *a: contextlib.nullcontext((held, 1.0)))
        monkeypatch.setattr(module, "checked", lambda op, held, seconds, check: check())
    return made


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The emulator's."""
    loaded, why_not = emulated.build(tmp_path_factory.mktemp("emulator"))
    if loaded is None:
        pytest.skip(why_not)
    return loaded
