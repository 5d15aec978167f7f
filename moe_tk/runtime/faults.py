"""From wait records to one readable sentence: who waited for whom, where, how long, and what to do."""

from __future__ import annotations

from moe_tk.errors import PeerLost, ProtocolTimeout

OPS = ("none", "moe_layer", "ag_gemm", "gemm_rs", "dispatch_gemm", "gemm_combine", "mega_moe")
PHASES = ("none", "barrier", "exchange", "dispatch", "gemm1", "gemm2", "combine", "reduce")
ROLES = ("host", "send", "place", "compute", "combine", "reduce")
KINDS = ("none", "timeout", "peer_lost", "told_by_peer", "host")
SLOT_UNITS = {"dispatch": "chunk", "gemm1": "row block", "gemm2": "row block", "combine": "row block", "reduce": "chunk"}


def op_code(name: str) -> int:
    """Number of an op in the records (protocol::op_id)."""
    return OPS.index(name)


def readable(record: dict) -> dict:
    """A record of the native module with names for numbers and `missing` as a list of ranks."""
    missing = [rank for rank in range(64) if record["missing"] >> rank & 1]
    return {**record, "op": OPS[record["op"]], "phase": PHASES[record["phase"]], "role": ROLES[record["role"]],
            "kind": KINDS[record["kind"]], "missing": missing}


def place_of(record: dict) -> str:
    """Where a rank waited: phase, role and the index it waited on."""
    unit = SLOT_UNITS.get(record["phase"])
    where = f", {unit} {record['slot']}" if unit and record["slot"] >= 0 else ""
    return f"phase {record['phase']}, role {record['role']}{where}"


def _sentence(record: dict) -> str:
    whom = _ranks(record["missing"]) if record["missing"] else "its own blocks"
    return (f"rank {record['rank']} waited {record['seconds']:.2f} s for {whom} ({place_of(record)}, {record['expected']} wanted, "
            f"{record['seen']} seen)")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def died(records: list[dict], dead: set[int]) -> set[int]:
    """The ranks whose death is the cause: those of `dead`, and those that another rank saw die. Not one that filed a record:
    it had given up and told the others before it ended."""
    seen = {record["producer"] for record in records if record["kind"] == "peer_lost"}
    return (dead | seen) - {record["rank"] for record in records}


def roots(records: list[dict], dead: set[int]) -> list[int]:
    """The ranks at the bottom of the chains: waited for, but neither waiting for another rank nor at work."""
    waiting = {record["rank"] for record in records if record["missing"]}
    at_work = {record["rank"] for record in records if record["kind"] == "told_by_peer" and not record["missing"]}
    wanted = {rank for record in records for rank in record["missing"]}
    raised = {record["rank"] for record in records if record["kind"] == "host"}
    found = died(records, dead) & wanted | raised or wanted - waiting - at_work or wanted - waiting
    return sorted(found or _last_to_come(records, wanted))


def _last_to_come(records: list[dict], wanted: set[int]) -> set[int]:
    """Of ranks that wait for each other: those that were told soon after they began to wait. A rank that was stopped and goes on
    finds the others gone, and is the one they had waited for."""
    told = {record["rank"]: record["seconds"] for record in records
            if record["kind"] == "told_by_peer" and record["rank"] in wanted}
    return {rank for rank, seconds in told.items() if seconds <= min(told.values()) + 0.1} or wanted


def error_from(records: list[dict], *, op: str, rank: int, dead: set[int], timeout_s: float) -> ProtocolTimeout:
    """The exception that ends a call whose waits failed. `records` are readable ones, of all ranks that filed one."""
    culprits = roots(records, dead)
    ordered = sorted(records, key=lambda record: (record["rank"] != rank, record["kind"] != "timeout", record["rank"]))
    waits = [_sentence(record) for record in ordered if record["missing"] or record["kind"] == "timeout"]
    chain = "; ".join(waits) or f"rank {rank} was told to stop"
    lost = sorted(died(records, dead) & set(culprits))
    if lost:
        return PeerLost(f"{op}: {_ranks(lost)} died (the process has ended). {chain}. No result was returned; this layer is "
                        "unusable: rebuild the process group and the layer.", records)
    raised = [record["rank"] for record in records if record["kind"] == "host"]
    if raised:
        return ProtocolTimeout(f"{op}: {_ranks(raised)} raised an exception in the middle of the call, or its program ended "
                               f"there. {chain}. Read the traceback of {_ranks(raised)}; this layer is unusable.", records)
    stuck = [record["rank"] for record in records if record["kind"] == "timeout"]
    if not culprits and stuck:
        return ProtocolTimeout(f"{op}: no rank is missing, but the blocks of {_ranks(stuck)} stood still. {chain}. The machine is "
                               "far too busy, or this is an error of moe_tk: please report it. The layer is unusable now.", records)
    missing = _ranks(culprits) if culprits else "nobody"
    return ProtocolTimeout(f"{op}: missing {missing}. {chain}. Did {missing} make the same call, and is it alive? If it is only "
                           f"slow, raise timeout_s (now {timeout_s:g}) or MOE_TK_TIMEOUT_S; this layer is unusable now.", records)
