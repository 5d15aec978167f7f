"""Builds the module with fault points once, before any rank waits for another."""

from __future__ import annotations

import pytest

from moe_tk.builder.build import build_host_module
from moe_tk.runtime.host import FAULT_POINT_FLAGS, NAME, SOURCES


@pytest.fixture(scope="session", autouse=True)
def fault_module():
    return build_host_module(NAME, SOURCES, extra_flags=FAULT_POINT_FLAGS)


@pytest.fixture(autouse=True)
def records_in(tmp_path, monkeypatch):
    """Wait records go where the test can look at them."""
    monkeypatch.setenv("MOE_TK_RECORD_DIR", str(tmp_path))
    return tmp_path
