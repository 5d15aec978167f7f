"""What the functional probes found: frozen records, versioned JSON, and the questions a verdict asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_tk.topology.codec import check_schema, from_plain, to_plain

PROBES_SCHEMA = "moe_tk.probes/1"
HOST = "host"  # stands for pinned host memory where a UUID is expected

# Of one check. "lost": increments missing. "refused": CUDA said no before anything ran.
STATUSES = ("ok", "mismatch", "lost", "timeout", "error", "refused", "skipped")


@dataclass(frozen=True, slots=True)
class Check:
    """One functional probe of src -> dst (UUIDs or HOST).

    kind: "push", "pull" (write and read back), "signal", "atomics". engine: "words", "bulk" or "".
    value: one-way microseconds of a signal. offset, seen, wanted, bad_words: first difference of a mismatch, and how
    many 16-byte words differ. sent, counted: increments.
    """

    kind: str
    src: str
    dst: str
    status: str
    engine: str = ""
    detail: str = ""
    value: float | None = None
    offset: int | None = None
    seen: str | None = None
    wanted: str | None = None
    bad_words: int | None = None
    sent: int | None = None
    counted: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured bandwidth, GB/s = 1e9 bytes/s, of the traffic that src's SMs (or copy engine) move to or from dst.

    op: "push" writes to dst, "pull" reads from dst. engine: "words", "bulk", "copy-engine". payload: "copy" moves real
    bytes from memory to memory, "wire" leaves out the local side. sms: 0 for the copy engine. load: "alone",
    "both-ways" (dst does the same to src), "duplex" (push and pull of one GPU at once), "all" (every GPU to every
    other; the number is the total of src over all its peers, dst is "all").
    """

    src: str
    dst: str
    op: str
    engine: str
    payload: str
    sms: int
    load: str
    gbs: float


@dataclass(frozen=True, slots=True)
class Interference:
    """A dense bf16 GEMM beside `sms` SMs that move data: microseconds, and how much slower than beside parked SMs."""

    gpu: str
    sms: int
    op: str
    engine: str
    parked_us: float
    gemm_us: float
    traffic_gbs: float
    shape: str = ""

    @property
    def slowdown(self) -> float:
        return self.gemm_us / self.parked_us


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """All probes of one group of GPUs on one boot of one machine."""

    schema: str = PROBES_SCHEMA
    moe_tk: str | None = None
    taken_at: str | None = None
    uuids: tuple[str, ...] = ()
    driver: str | None = None
    boot_id: str | None = None
    depth: str = "none"            # "none", "quick" (correctness, latency) or "full"
    limit_s: float | None = None   # of one step
    seconds: float | None = None   # of everything
    checks: tuple[Check, ...] = ()
    rates: tuple[Rate, ...] = ()
    interference: tuple[Interference, ...] = ()
    notes: tuple[str, ...] = ()    # what was not run, and why

    def checks_of(self, src: str, dst: str, *kinds: str) -> list[Check]:
        return [c for c in self.checks if (c.src, c.dst) == (src, dst) and c.kind in kinds]

    def read_back(self, src: str, dst: str) -> Check | None:
        """The check that decides about src -> dst: the first that is not ok, else one that is, else None."""
        found = [c for c in self.checks_of(src, dst, "push", "pull", "signal") if c.status != "skipped"]
        for check in found:
            if check.status != "ok":
                return check
        complete = {"push", "pull"} <= {c.kind for c in found}
        return found[0] if complete else None

    def latency_us(self, src: str, dst: str) -> float | None:
        values = [c.value for c in self.checks if c.kind == "signal" and {c.src, c.dst} == {src, dst} and c.value]
        return max(values) if values else None

    def best_rate(self, src: str, dst: str, *, load: str | None = None, op: str | None = None,
                  payload: str | None = "copy", engine: str | None = None, sms: int | None = None) -> Rate | None:
        """The fastest measurement that matches; None matches anything, but for engine only what SMs drive."""
        found = [r for r in self.rates if (r.src, r.dst) == (src, dst) and load in (None, r.load)
                 and op in (None, r.op) and payload in (None, r.payload) and sms in (None, r.sms)
                 and (r.engine == engine if engine else r.engine != "copy-engine")]
        return max(found, key=lambda r: r.gbs, default=None)


def probes_to_json(probes: ProbeResults) -> dict[str, Any]:
    return to_plain(probes)


def probes_from_json(data: Any) -> ProbeResults:
    check_schema(data, PROBES_SCHEMA)
    return from_plain(ProbeResults, data, "probes")
