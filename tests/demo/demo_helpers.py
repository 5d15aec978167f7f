"""What the demo tests share: command lines, made-up records, and ranks that go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from moe_tk.demo.options import Options
from moe_tk.demo.records import ModeRecord, PatternRecord, RankRecord

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 90


def clean_environment() -> dict[str, str]:
    """Of a child: this checkout first, nothing that makes a pipe look like a terminal."""
    kept = {name: value for name, value in os.environ.items()
            if name not in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "PYTHONPATH")}
    return {**kept, "PYTHONPATH": str(REPO), "TERM": "xterm-256color"}


def run_python(*words: str, **named) -> subprocess.CompletedProcess:
    """`python WORDS` in a child with a time limit; output as text."""
    return subprocess.run([sys.executable, *words], cwd=REPO, env=clean_environment(), text=True, timeout=LIMIT_S,
                          **{"capture_output": "stderr" not in named, **named})


def pattern_record(**changes) -> PatternRecord:
    """A good record of one rank on the serial path."""
    fields = dict(error_squared=1e-6, reference_squared=1.0, shipped_error_squared=1e-6, shipped_squared=1.0,
                  digests=["a", "a", "a"], seconds=[1.0, 3.0, 2.0], bytes_dispatched=[], bytes_combined=[], wait_s={}, busy_s={},
                  trace=[], traced_ns=(0, 100))
    return PatternRecord(**{**fields, **changes})


def rank_record(rank: int, patterns: dict[str, PatternRecord], mode: str = "ep") -> RankRecord:
    """A record of one rank in one mode."""
    record = ModeRecord(patterns=patterns, readiness={}, plan="a plan", starting_roles=["send", "place", "compute", "combine"],
                        experts=(0, 4), columns=8)
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 8}
    return RankRecord(rank=rank, tokens=4, sizes=sizes, dtype="bfloat16", budget=1e-2, reference_error_squared=0.0,
                      shipped_squared=1.0, modes={mode: record})


def corrupt_weight(rank: int, world: int, options: Options, say_to: object):
    """A rank of the demo in which rank 1's experts have one wrong row each; the reference has the right ones."""
    from moe_tk.demo import run

    right = run.shard_weights

    def wrong(*args, **named):
        w13, w2 = (tensor.clone() for tensor in right(*args, **named))
        if rank == 1:
            w2[:, 3] += 1.0
        return w13, w2

    run.shard_weights = wrong
    return run.rank_main(rank, world, options, say_to)


def break_rank_1(rank: int, world: int, options: Options, say_to: object):
    """A rank of the demo; rank 1 raises (--calls 1) or is killed (--calls 2) in the middle of its second call."""
    from moe_tk.demo import run
    from moe_tk.runtime import calls

    build, count = calls.build_tables, [0]

    def broken(*args, **named):
        count[0] += 1
        if rank == 1 and count[0] == 2:
            if options.calls == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no table today")
        return build(*args, **named)

    calls.build_tables = broken
    return run.rank_main(rank, world, options, say_to)
