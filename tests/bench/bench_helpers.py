"""Options of tests, and a run of the command."""

from __future__ import annotations

import argparse
from typing import Any

from moe_tk.bench.options import Options, parse_options
from moe_tk.cli import bench_layer


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_layer.add_arguments(parser)
    return parser.parse_args(list(words))


def options(*words: str) -> Options:
    return parse_options(arguments("--backend", "cpu", *words))


def line(**changes: Any) -> dict[str, Any]:
    """A line as run.py makes it: ours 200 us, two rivals, floor 132."""
    def contender(name: str, ours: bool, us: float | None, state: str = "ok", why: str | None = None) -> dict[str, Any]:
        times = {} if us is None else {"graph": {"median": us, "min": us, "max": us, "quartiles": [us, us], "rounds": 3}}
        return {"name": name, "ours": ours, "against": not ours, "state": state, "why": why, "error": 0.003, "notes": [],
                "us": times}

    return {"shape": "qwen3-30b-a3b", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "mode": "ep",
            "dtype": "bf16", "routing": "uniform", "tokens": 64, "world": 2,
            "traffic": {"rows": 539, "touched": 64, "weight_bytes": 1, "flops": 1, "wire_bytes": 1},
            "floor": {"weights_us": 132.0, "flops_us": 6.0, "wire_us": 1.0, "us": 132.0, "bound": "weights"},
            "contenders": [contender("two_kernel", True, 200.0),
                           contender("serial", True, None, "not available", "no such pattern"),
                           contender("torch", False, 272.0), contender("triton", False, 206.0),
                           contender("deepgemm", False, None, "failed", "RuntimeError: no kernel")],
            "ours": {"name": "two_kernel", "us": 200.0}, "best_rival": {"name": "triton", "us": 206.0}, "to_floor": 200 / 132,
            "to_rival": 200 / 206, "calls_per_sample": 8, "gpu": {}, "seconds": 1.0, **changes}
