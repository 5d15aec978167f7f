"""Groups: any ProcessGroup, any one-dimensional mesh, destroyed and made again; several layers on one workspace."""

from __future__ import annotations

import pytest
from backends import cuda, on_both_with_ranks, ranks_on
from group_ranks import in_meshes, in_subgroup, rebuild_group, rebuilt_layers, subgroups_that_come_and_go, two_groups_at_once
from moe_cases import LayerCase

from moe_tk.errors import ArgumentTypeError, TopologyError

PAIR = LayerCase(((9, 4), (3, 0)), ("uniform", "half"))


@pytest.mark.parametrize("backend, members", [
    ("cpu", [1, 3]), ("cpu", [3, 1]), ("cpu", [2]), cuda([1, 0], world=2), cuda([1], world=2), cuda([1, 3], world=4)])
def test_a_group_that_is_not_the_world(run_ranks, backend, members):
    """Ranks are those of the group, whatever their global numbers; a process outside is told so."""
    case = LayerCase(tuple(counts[:len(members)] for counts in PAIR.counts), PAIR.routings).on(backend)
    results = run_ranks(ranks_on(backend, 4), in_subgroup, case, members, backend=backend)
    for rank, result in enumerate(results):
        if rank in members:
            assert result == (len(members), sorted(members).index(rank))
        else:
            assert result[0] == "TopologyError" and "not a member of the group" in result[1]


@on_both_with_ranks
def test_device_meshes(run_ranks, backend):
    """One dimension is a group, also a row of a larger mesh; more are refused with the remedy."""
    case = LayerCase(((5, 4, 3, 2),), ("uniform",)).on(backend)
    for error, text, _ in run_ranks(ranks_on(backend, 4), in_meshes, case, backend=backend):
        assert error == "ArgumentTypeError" and "DeviceMesh of 2 dimensions, wanted one" in text and "mesh['name']" in text


@pytest.mark.parametrize("backend", ["cpu", cuda(world=4)])
def test_groups_side_by_side(run_ranks, backend):
    run_ranks(4, two_groups_at_once, LayerCase(((5, 4, 3, 2),), ("uniform",)).on(backend), backend=backend)


@on_both_with_ranks
def test_sym_08_a_group_destroyed_and_made_again_five_times(pools, tmp_path, backend):
    """Right results in every life, also with the old layer still referenced; no mapping and no file descriptor stays."""
    outcomes = pools.fresh(2, rebuild_group, PAIR.on(backend), str(tmp_path), 5, backend=backend)
    assert not [outcome.error for outcome in outcomes if outcome.error], outcomes
    for outcome in outcomes:
        lives = outcome.value
        assert [maps for _, maps in lives][0::2] == [0, 0, 0]
        # What NCCL opens for a group it keeps for the process: only that it does not grow without end.
        assert lives[4][0] <= lives[2][0] + (0 if backend == "cpu" else 16), f"file descriptors grow: {lives}"


def test_sym_08_ops_of_groups_that_come_and_go(run_ranks):
    """What ops hold for a destroyed group goes when the next group comes: two segments of the lobby, two of the data."""
    assert run_ranks(2, subgroups_that_come_and_go) == [4, 4]


@on_both_with_ranks
def test_layers_of_one_geometry_share_a_workspace(run_ranks, backend):
    assert run_ranks(2, rebuilt_layers, PAIR.on(backend), backend=backend) == [(1, 0), (1, 0)]


@pytest.mark.parametrize("group", ["WORLD", 3, object(), [0, 1]])
def test_what_is_no_group_is_refused(group):
    with pytest.raises(ArgumentTypeError, match="group must be a ProcessGroup, a one-dimensional DeviceMesh or None, got "):
        PAIR.layer(group)


def test_a_process_outside_of_the_group_is_told_so():
    from torch.distributed import GroupMember

    with pytest.raises(TopologyError, match="not a member of the group"):
        PAIR.layer(GroupMember.NON_GROUP_MEMBER)
