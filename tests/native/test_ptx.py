"""The device side in PTX: every primitive has the order and the scope that were asked for, the wires do what they say."""

from __future__ import annotations

import re

import pytest
from native_ptx import kernels, memory_order, remote_accesses
from native_tools import REPO, compile_ptx

SCOPES = {"block": "cta", "device": "gpu", "system": "sys"}
PRIMITIVES = {
    "load_acquire": "ld.acquire.{scope}.u{bits}",
    "load_relaxed": "ld.relaxed.{scope}.u{bits}",
    "store_release": "st.release.{scope}.u{bits}",
    "store_relaxed": "st.relaxed.{scope}.u{bits}",
    "fetch_add_acq_rel": "atom.acq_rel.{scope}.add.u{bits}",
    "exchange_acq_rel": "atom.acq_rel.{scope}.exch.b{bits}",
    "red_release": "red.release.{scope}.add.u{bits}",
}
HEAP_BASE_1, PEERS_1 = "[{kernel}_param_0+8]", "[{kernel}_param_1+16]"  # symmetric_heap::base[1], wait_context::peers[1]
PLAIN_STORE, PLAIN_LOAD = re.compile(r"st(\.global)?(\.v\d)?\.[ubf]\d+"), re.compile(r"ld(\.global)?(\.v\d)?\.[ubf]\d+")


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    return kernels(compile_ptx("ptx_probe.cu", "90a", tmp_path_factory.mktemp("ptx")))


def accesses(probe, kernel):
    return remote_accesses(probe[kernel], (HEAP_BASE_1.format(kernel=kernel), PEERS_1.format(kernel=kernel)))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_krn_04_primitive_has_the_asked_order_and_scope(probe, name, scope, bits):
    wanted = PRIMITIVES[name].format(scope=SCOPES[scope], bits=bits)
    order = memory_order(probe[f"{name}_{scope}_{bits}"])
    assert [op for op in order if not (PLAIN_STORE.fullmatch(op) or PLAIN_LOAD.fullmatch(op))] == [wanted]


@pytest.mark.parametrize("scope", SCOPES)
def test_fence_stands_between_the_stores(probe, scope):
    before, fence, after = memory_order(probe[f"fence_{scope}"])
    assert fence == f"fence.acq_rel.{SCOPES[scope]}" and PLAIN_STORE.fullmatch(before) and PLAIN_STORE.fullmatch(after)


def test_nap_clock_and_proxy_fence(probe):
    assert "nanosleep.u32" in [i.opcode for i in probe["nap"]]
    assert any("%globaltimer" in operand for i in probe["wall_clock"] for operand in i.operands)
    assert memory_order(probe["fence_proxy_async"])[1] == "fence.proxy.async"


def test_krn_05_nothing_moves_across_release_and_acquire(probe):
    """Both stores of one word stay, on their sides of the release; the load after the acquire is not the one before it."""
    first, release, second = memory_order(probe["release_after_stores"])
    assert release == "st.release.sys.u32" and PLAIN_STORE.fullmatch(first) and PLAIN_STORE.fullmatch(second)
    before, acquire, after, _ = memory_order(probe["acquire_before_loads"])
    assert acquire == "ld.acquire.sys.u32" and PLAIN_LOAD.fullmatch(before) and PLAIN_LOAD.fullmatch(after)


def test_rows_for_tma_pass_a_proxy_fence_on_both_sides(probe):
    store, proxy, counter = memory_order(probe["row_written"])
    assert PLAIN_STORE.fullmatch(store) and (proxy, counter) == ("fence.proxy.async", "atom.acq_rel.gpu.add.u32")
    order = memory_order(probe["row_awaited"])
    done = order.index("fence.proxy.async")
    assert order.count("fence.proxy.async") == 1 and "ld.acquire.gpu.u32" in order[:done]
    assert PLAIN_STORE.fullmatch(order[done + 1])  # what the wait lets through comes behind it


def test_krn_05_signal_of_each_wire(probe):
    """Data, (pcie: system fence,) release store at system scope: nothing else, in this order."""
    for wire, fences in (("shm", []), ("pcie", ["fence.acq_rel.sys"]), ("nvlink", [])):
        data, *rest = memory_order(probe[f"{wire}_signal"])
        assert PLAIN_STORE.fullmatch(data)
        assert rest == [*fences, "st.release.sys.u32"], wire


def test_krn_05_election_before_the_published_slot(probe):
    local = "atom.acq_rel.gpu.add.u32"
    assert memory_order(probe["pcie_publish"]) == [local, "fence.acq_rel.sys", "st.release.sys.u32"]
    assert memory_order(probe["shm_publish"]) == [local, "st.release.sys.u32"]
    assert memory_order(probe["nvlink_publish"]) == ["red.release.sys.add.u32"]


@pytest.mark.parametrize("wire", ["shm", "pcie", "nvlink"])
def test_krn_06_a_whole_call_never_loads_from_the_peer(probe, wire):
    """exchange, rows, watermark, waits, abort, barrier of one rank: stores only. Nothing polls the peer's memory."""
    remote = accesses(probe, f"call_{wire}")
    kinds = {op.split(".")[0] for op in remote}
    assert kinds == ({"st", "red"} if wire == "nvlink" else {"st"})
    assert "st.release.sys.u32" in remote and any(PLAIN_STORE.fullmatch(op) for op in remote)


def test_krn_05_only_nvlink_reduces_at_the_peer(probe):
    assert [op for op in accesses(probe, "call_nvlink") if op.startswith("red")] == ["red.release.sys.add.u32"]
    for wire in ("pcie", "shm"):
        opcodes = [i.opcode for i in probe[f"call_{wire}"]]
        assert not any(op.startswith("red") or re.match(r"atom\.\w+\.sys", op) for op in opcodes)


def test_the_checker_finds_a_remote_poll_and_a_remote_counter(probe):
    assert "ld.acquire.sys.u32" in accesses(probe, "bad_poll")
    assert accesses(probe, "bad_count") == ["atom.acq_rel.sys.add.u32"]


def test_no_proxy_fence_before_there_is_tma(tmp_path):
    old = kernels(compile_ptx("ptx_probe.cu", "89", tmp_path))
    assert "fence.proxy.async" not in memory_order(old["fence_proxy_async"])
    assert memory_order(old["pcie_signal"])[1:] == ["fence.acq_rel.sys", "st.release.sys.u32"]


def test_all_ptx_is_in_one_file_with_memory_clobbers():
    folders = ("platform", "protocol")
    files = [path for name in folders for path in sorted((REPO / "tk_kernels" / name).glob("*.*"))]
    assert len(files) > 10
    for path in files:
        statements = re.findall(r"\basm\b.*", path.read_text())
        if path.name != "atomics_device.cuh":
            assert not statements, path
            continue
        assert len(statements) > 5
        for statement in statements:
            assert statement.startswith("asm volatile(") and '"memory")' in statement, statement
