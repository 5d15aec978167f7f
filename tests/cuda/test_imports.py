"""What only a machine with GPUs runs can be imported anywhere: a name that has moved is found here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.relative_to(ROOT) for folder in ("tests/cuda", "benchmarks") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_it_can_be_imported(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / path.parent)
    spec = importlib.util.spec_from_file_location(f"imported_{path.stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look for it
    spec.loader.exec_module(module)
