"""Modules built in caches of their own, side by side, and moved into the real one (tests/build_modules.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_tk.builder.build import build_host_module
from moe_tk.errors import BuildError
from tests.build_modules import aside


def test_a_module_built_aside_is_found_and_nothing_else_is_left(mini_root, cache, counting_cxx):
    def build() -> Path:
        return build_host_module("mini", ["mini.cpp"], root=mini_root)

    name, _ = aside(build)
    stem = Path(name).stem
    assert {path.name for path in cache.iterdir()} == {name, stem + ".json", stem + ".log"}
    assert build() == cache / name and aside(build)[0] == name
    assert counting_cxx() == 1 and os.environ["MOE_TK_CACHE_DIR"] == str(cache)


def test_a_failed_build_leaves_nothing(mini_root, cache):
    (mini_root / "mini.cpp").write_text("#error no\n")
    with pytest.raises(BuildError, match="building mini failed"):
        aside(lambda: build_host_module("mini", ["mini.cpp"], root=mini_root))
    assert not list(cache.iterdir()) and os.environ["MOE_TK_CACHE_DIR"] == str(cache)
