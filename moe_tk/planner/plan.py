"""The plan of a layer: every choice, made once when the layer is built, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from moe_tk.errors import ArgumentTypeError
from moe_tk.sizes import check_count, check_one_of
from moe_tk.topology.verdict import decide_cpu

PATTERNS = ("auto", "mega", "two_kernel", "serial")
ROW_BLOCK = 32
COLUMN_BLOCK = 64
JOB_CHUNK = 32
MAX_SEGMENTS = 4
MIN_SEGMENT_TOKENS = 64  # per rank; smaller segments are mostly padding


@dataclass(frozen=True)
class Plan:
    """Choices of one layer. Block counts are the blocks that start in each role; they move on when their work is done."""

    pattern: str
    protocol: str
    segments: int          # batches of tokens whose tasks run one after the other
    row_block: int         # slots of a row block
    column_block: int      # output columns of a task
    job_chunk: int         # rows between two watermarks
    warmup: int            # row blocks by which Linear 2 follows Linear 1 in mega
    send_blocks: int
    place_blocks: int
    compute_blocks: int
    combine_blocks: int
    pull: bool             # receivers read rows instead of owners writing them
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """What was chosen and why, one line each."""
        head = (f"pattern {self.pattern}, protocol {self.protocol}, {self.segments} segment(s), row blocks of "
                f"{self.row_block}, column blocks of {self.column_block}, blocks: {self.send_blocks} send, "
                f"{self.place_blocks} place, {self.compute_blocks} compute, {self.combine_blocks} combine")
        return "\n".join([head, *(f"  - {reason}" for reason in self.reasons)])


def default_segments(max_tokens: int) -> int:
    """Segments of a layer for up to max_tokens tokens of a rank."""
    return max(1, min(MAX_SEGMENTS, max_tokens // MIN_SEGMENT_TOKENS))


def choose_pattern(pattern: str, reasons: list[str]) -> str:
    """The pattern of a layer on the CPU back end."""
    if check_one_of("pattern", pattern, PATTERNS) != "auto":
        return pattern
    reasons.append("pattern mega: the CPU back end is there to run the fused path anywhere; the rule that falls back to serial "
                   "weighs GPU times and is not applied to it")
    return "mega"


def choose_protocol(protocol: str, reasons: list[str]) -> str:
    """The protocol of a layer on the CPU back end: the topology's verdict, which minds the argument and MOE_TK_PROTOCOL."""
    verdict = decide_cpu(protocol).require()
    reasons.append(f"protocol {verdict.protocol}: {verdict.text}")
    return verdict.protocol


def make_plan(*, pattern: str, protocol: str, max_tokens: int, cores: int, world: int, segments: int | None = None,
              compute_blocks: int | None = None, pull: bool = False) -> Plan:
    """Plan of a layer on the CPU back end.

    max_tokens, world  per rank, ranks;  cores  of this machine, shared by the ranks that run on it
    segments, compute_blocks  None = chosen here
    Raises ArgumentError for names and counts that cannot be, TopologyError for a protocol that needs GPUs.
    """
    reasons: list[str] = []
    chosen = choose_pattern(pattern, reasons)
    protocol = choose_protocol(protocol, reasons)
    if segments is None:
        segments = default_segments(max_tokens)
        reasons.append(f"{segments} segment(s): at least {MIN_SEGMENT_TOKENS} tokens of a rank in each, at most {MAX_SEGMENTS}")
    else:
        check_count("segments", segments)
    if compute_blocks is None:
        compute_blocks = max(1, cores // max(world, 1))
        reasons.append(f"{compute_blocks} compute block(s): {cores} core(s) shared by {world} rank(s)")
    else:
        check_count("compute_blocks", compute_blocks)
    if not isinstance(pull, bool):
        raise ArgumentTypeError(f"pull is {pull!r}, wanted True (receivers read rows) or False (owners write them)")
    return Plan(pattern=chosen, protocol=protocol, segments=segments, row_block=ROW_BLOCK, column_block=COLUMN_BLOCK,
                job_chunk=JOB_CHUNK, warmup=2 * compute_blocks, send_blocks=1, place_blocks=1, compute_blocks=compute_blocks,
                combine_blocks=1, pull=pull, reasons=tuple(reasons))
