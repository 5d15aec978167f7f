"""The back ends that a test runs on: marks for parameters, and how many ranks there can be. For test files, not for ranks.

`backend` is "cpu" or "cuda". A test of the CUDA back end is marked gpu, or multi_gpu where it takes several ranks, and is
skipped, visibly, where there are too few GPUs that the kernels run on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from moe_cases import PATTERNS_OF


@functools.cache
def hoppers() -> int:
    """Number of GPUs of compute capability 9.0."""
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return sum(torch.cuda.get_device_capability(index) == (9, 0) for index in devices)


def needs(world: int) -> list[pytest.MarkDecorator]:
    """Marks of a test with `world` ranks on the CUDA back end."""
    few = pytest.mark.skipif(hoppers() < world, reason=f"needs {world} GPU(s) of compute capability 9.0, found {hoppers()}")
    return [pytest.mark.gpu if world == 1 else pytest.mark.multi_gpu, few]


def cuda(*values: Any, world: int) -> Any:
    """A parameter set of the CUDA back end with `world` ranks."""
    return pytest.param("cuda", *values, marks=needs(world))


def ranks_on(backend: str, world: int) -> int:
    """`world` ranks on the CPU back end, as many of them as there are GPUs on the other: for tests that work with any number."""
    return world if backend == "cpu" else min(world, hoppers())


on_both = pytest.mark.parametrize("backend", ["cpu", cuda(world=1)])
on_both_with_ranks = pytest.mark.parametrize("backend", ["cpu", cuda(world=2)])


def each_pattern(*patterns: str, world: int) -> pytest.MarkDecorator:
    """Parameters (backend, pattern): these patterns on the CPU back end, and those that the CUDA back end has."""
    return pytest.mark.parametrize("backend, pattern", [
        *(("cpu", pattern) for pattern in patterns), *(cuda(pattern, world=world) for pattern in PATTERNS_OF["cuda"])])


def each_movement(*movements: tuple[str, bool], world: int) -> pytest.MarkDecorator:
    """Parameters (backend, pattern, pull): as each_pattern, with the directions in which rows can move. On CUDA there is one."""
    return pytest.mark.parametrize("backend, pattern, pull", [
        *(("cpu", *movement) for movement in movements), *(cuda(pattern, False, world=world) for pattern in PATTERNS_OF["cuda"])])


def each_world(on_cpu: Iterable[int], on_cuda: Iterable[int]) -> pytest.MarkDecorator:
    """Parameters (backend, world)."""
    return pytest.mark.parametrize("backend, world", [
        *(("cpu", world) for world in on_cpu), *(cuda(world, world=world) for world in on_cuda)])
