"""The shipped C++ templates as ranks in one process: under ThreadSanitizer, over a network that reorders, and broken on purpose."""

from __future__ import annotations

import pytest
from native_programs import RACE_STATUS, run_program, verdict_of
from native_tools import start_compile

NEAR_WRAP = "first_epoch=0xfffffff0"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Both programs, compiled side by side."""
    folder = tmp_path_factory.mktemp("native")
    started = [start_compile(name, folder) for name in ("threads", "reorder")]
    for _, process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and not output, output
    return {target.name: target for target, _ in started}


@pytest.fixture(scope="module")
def threads(programs):
    probe = run_program(programs["threads"], "calls=1")
    if "unexpected memory mapping" in probe.stderr:
        pytest.skip(f"ThreadSanitizer cannot run on this kernel: {probe.stderr.strip().splitlines()[-1]}")
    return programs["threads"]


def assert_passes(program, *options):
    done = run_program(program, *options)
    assert done.returncode == 0, f"{options}: status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    result = verdict_of(done)
    assert result["verdict"] == "passed" and result["tokens_checked"] > 100
    return result


@pytest.mark.parametrize("options", [
    ("wire=shm",), ("wire=shm", "pull=1"), ("wire=pcie",), ("wire=nvlink",), ("wire=nvlink", "pull=1"),
    ("wire=shm", "pattern=two_kernel"), ("wire=nvlink", "pattern=two_kernel"), ("wire=pcie", "world=2"), ("wire=shm", "world=4"),
], ids=" ".join)
def test_krn_04_no_data_race_in_any_pattern(threads, options):
    assert_passes(threads, *options, "calls=60", "delays=6", "seed=7")


@pytest.mark.parametrize("wire", ["shm", "pcie", "nvlink"])
def test_epochs_and_counters_cross_the_wrap(threads, wire):
    assert_passes(threads, f"wire={wire}", NEAR_WRAP, "calls=40", "seed=3")


@pytest.mark.parametrize("wire", ["shm", "nvlink"])
def test_grf_01_launches_with_frozen_arguments(threads, wire):
    """Only memory changes between the calls: the epoch moves on in it, so no call sees the data of the one before."""
    assert_passes(threads, f"wire={wire}", "frozen=1", NEAR_WRAP, "calls=60", "seed=5")


@pytest.mark.parametrize("wire", ["shm", "pcie", "nvlink"])
def test_slot_unused_for_half_the_epochs_is_not_from_the_future(threads, wire):
    assert_passes(threads, f"wire={wire}", "scenario=idle", "calls=5")


def test_slot_unused_for_half_the_epochs_needs_its_refresh(threads):
    done = run_program(threads, "scenario=idle", "mutant=skip_refresh", "timeout_s=3")
    assert verdict_of(done)["verdict"] == "wrong_data"


def test_thread_sanitizer_finds_a_forgotten_release(threads):
    done = run_program(threads, "wire=relaxed", "calls=20")
    assert done.returncode == RACE_STATUS and "data race" in done.stderr


@pytest.mark.parametrize("scenario", [
    ("scenario=late", "timeout_s=1"), ("scenario=lost",), ("scenario=throws",), ("scenario=half_abort",),
], ids=lambda options: options[0])
def test_krn_09_krn_11_fault_ends_all_ranks_and_names_the_missing(threads, scenario):
    """late: time-out names the rank. lost: at once. throws: all end. half_abort: who was told passes it on (limit: 20 s)."""
    done = run_program(threads, *scenario)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert verdict_of(done)["problem"] == ""


@pytest.mark.parametrize("options", [
    ("wire=pcie",), ("wire=pcie", "network=fences"), ("wire=pcie", "network=releases"), ("wire=pcie", "network=lossy"),
    ("wire=pcie", "pattern=two_kernel"), ("wire=pcie", NEAR_WRAP), ("wire=pcie", "frozen=1"), ("wire=pcie", "world=4"),
    ("wire=nvlink",), ("wire=nvlink", "frozen=1", NEAR_WRAP), ("wire=nvlink", "pattern=two_kernel"), ("wire=shm",),
], ids=" ".join)
def test_krn_05_reordering_network(programs, options):
    """pcie holds on links that keep order by fences only, by releases only, lose increments, and never show remote loads."""
    result = assert_passes(programs["reorder"], *options, "calls=250", "seed=11")
    assert result["overtaken"] > 300  # the network did reorder


@pytest.mark.parametrize("kind, options", [
    ("wrong_data", ("wire=shm", "network=fences")),           # fence dropped, on a link where only fences order
    ("wrong_data", ("wire=pcie", "network=nothing")),         # neither fence nor release orders anything
    ("wrong_data", ("wire=signal_first",)),                   # slot stored before the data
    ("wrong_data", ("wire=pcie", "mutant=early_election")),   # elected one too early
    ("wrong_data", ("wire=pcie", "mutant=frozen_epoch")),     # epoch not advanced (GRF-01, GRF-02)
    ("wrong_data", ("wire=pcie", "mutant=no_barrier")),       # header written before the peer's call is over
    ("wrong_data", ("wire=pcie", "mutant=ring_ignored")),     # entry filled before the earlier generation is freed
    ("wrong_data", ("wire=pulling",)),                        # remote loads
    ("timeout", ("wire=pcie", "mutant=remote_poll")),         # KRN-06: polls the peer's memory
    ("timeout", ("wire=nvlink", "network=lossy")),            # remote counter that loses increments
    # a ring of two segments with one of warm-up, on a routing that the long runs found: rows wait for entries that are freed
    # by tasks behind their own
    ("timeout", ("wire=pcie", "mutant=long_warmup", "seed=1", "first_call=48308", "delays=0")),
], ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_krn_05_krn_06_broken_copies_fail(programs, kind, options):
    limit = 2 if kind == "timeout" else 20
    result = verdict_of(run_program(programs["reorder"], "calls=250", "seed=11", f"timeout_s={limit}", *options))
    assert result["verdict"] == kind, result
