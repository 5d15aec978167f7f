"""Fixtures of the doctor's tests: recorded machines, and GPUs where there are some (found without a context)."""

from __future__ import annotations

import functools
import os

import machines
import pytest

from moe_tk.topology.reader import query_cuda


@pytest.fixture
def machine_snapshot(tmp_path):
    """snapshot(name or machine, environ) of a recorded machine."""
    def take(machine, environ=None, **kwargs):
        return machines.snapshot(machine, tmp_path, environ, **kwargs)

    return take


@functools.cache
def count_gpus() -> int:
    return len(query_cuda(os.environ)["devices"])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests marked gpu or multi_gpu are skipped, visibly, where the GPUs are missing."""
    wanted = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
    if wanted and count_gpus() < wanted:
        pytest.skip(f"needs {wanted} CUDA GPU(s), found {count_gpus()}")


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """A cache folder of its own, so that no test sees what another machine or run has kept."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOE_TK_CACHE_DIR", str(folder))
    return folder
