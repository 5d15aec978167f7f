"""What ranks hand back: plain values, picklable, torch-free, so that whoever merges them needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PatternRecord:
    """One rank's calls of one pattern. Squared sums are over this rank's tokens, in float64."""

    error_squared: float         # ||y - reference||^2 of the worst call
    reference_squared: float     # ||reference||^2
    shipped_error_squared: float  # ||y - y_ref||^2, y_ref as it ships
    shipped_squared: float       # ||y_ref||^2
    digests: list[str]           # of the output of every call, warm-up and traced one included
    seconds: list[float]         # of each timed call
    bytes_dispatched: list[int]  # [R] to each rank, one call; [] on the serial path and on GPUs, as the next ones
    bytes_combined: list[int]    # [R]
    wait_s: dict[str, float]     # by phase, summed over blocks, mean of the timed calls
    busy_s: dict[str, float]
    trace: list[tuple] = field(repr=False)  # of the traced call: CallStats.trace
    traced_ns: tuple[int, int] = (0, 0)     # begin and end of the traced call, on the clock of the trace


@dataclass(frozen=True)
class ModeRecord:
    """One rank's work in one mode."""

    patterns: dict[str, PatternRecord]
    readiness: dict[int, dict]   # by number of segments: Readiness.to_dict()
    plan: str                    # Plan.explain() of the last pattern
    starting_roles: list[str]    # of the blocks of a whole launch, by block index
    experts: tuple[int, int]     # first, count
    columns: int                 # intermediate columns here


@dataclass(frozen=True)
class RankRecord:
    """Everything that one rank hands back."""

    rank: int
    tokens: int
    sizes: dict[str, int]
    dtype: str
    budget: float                # relative error that rounding explains: moe_tk.reference.ERROR_BUDGET
    reference_error_squared: float  # ||reference - y_ref||^2: two independent float64 computations
    shipped_squared: float
    modes: dict[str, ModeRecord]
    gpu: str | None = None       # name of the rank's GPU; None on the CPU back end


@dataclass(frozen=True)
class Failure:
    """A rank raised: who, when (monotonic, so that the first of several is known), what and where."""

    rank: int
    when: float
    text: str
    where: str = ""  # its traceback
