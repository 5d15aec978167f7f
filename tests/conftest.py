"""What all test folders share: ranks that stay up between tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """Processes of this test run, by world size; nothing of them is left at its end."""
    from ranks import Pools  # not above: most folders need neither ranks nor torch

    pools = Pools(tmp_path_factory.mktemp("wait_records"))
    yield pools
    pools.close()


@pytest.fixture
def run_ranks(pools):
    """run_ranks(world, target, *args): [target(rank, world, *args)] of ranks that stay up between tests."""
    return pools.run


@pytest.fixture
def fresh_ranks(pools):
    """fresh_ranks(world, target, *args): outcomes of ranks that are started for this and end with it."""
    return pools.fresh


@pytest.fixture(scope="session")
def _frozen():
    """What the test run has loaded by now need not be searched for garbage after every test."""
    import gc

    import moe_tk.layer  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_left(_frozen):
    """For tests with a layer in this process: asserts afterwards that its memory and threads are gone."""
    from ranks import leftovers

    yield
    assert leftovers() == []
