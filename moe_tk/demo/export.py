"""The whole run as JSON, written at once or not at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from moe_tk.demo.environment import environment
from moe_tk.demo.inside import make_picture
from moe_tk.demo.options import Options
from moe_tk.demo.picture import LETTERS
from moe_tk.demo.records import RankRecord
from moe_tk.demo.results import Result, reference_difference

FORMAT = 1
PICTURE_SLOTS = 240


def to_json(options: Options, ranks: Sequence[RankRecord], results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Everything that the report shows, and each rank's part of it. Times in seconds, sizes in bytes, shares in 0..1."""
    return {
        "format": FORMAT, "passed": all(result.passed for result in results), "seconds": seconds, "environment": environment(),
        "arguments": asdict(options), "world": len(ranks), "gpus": [rank.gpu for rank in ranks if rank.gpu],
        "tokens": [rank.tokens for rank in ranks],
        "layer": {**ranks[0].sizes, "dtype": ranks[0].dtype}, "error_budget": results[0].budget,
        "reference_vs_shipped": reference_difference(ranks),
        "modes": {mode: _mode(mode, ranks) for mode in ranks[0].modes}, "results": [_result(ranks, result) for result in results],
        "letters": LETTERS,
    }


def _mode(mode: str, ranks: Sequence[RankRecord]) -> dict[str, Any]:
    records = [rank.modes[mode] for rank in ranks]
    return {
        "plan": records[0].plan, "starting_roles": records[0].starting_roles,
        "experts": [list(record.experts) for record in records],  # first, count
        "intermediate_columns": [record.columns for record in records],
        "readiness": [{str(segments): report for segments, report in record.readiness.items()} for record in records],
    }


def _result(ranks: Sequence[RankRecord], result: Result) -> dict[str, Any]:
    return {
        "mode": result.mode, "pattern": result.pattern, "passed": result.passed, "error": result.error,
        "error_vs_shipped": result.shipped_error, "repeats_equal": result.repeats_equal, "calls": result.num_calls,
        "seconds": result.seconds, "median_seconds": result.median_s, "time_over_serial": result.ratio,
        "bytes_dispatched": result.bytes_dispatched, "bytes_combined": result.bytes_combined, "wait_s": result.wait_s,
        "busy_s": result.busy_s, "overlap": asdict(result.overlap), "timeline": _timeline(ranks, result),
        "ranks": [{f.name: getattr(record, f.name) for f in fields(record) if f.name != "trace"} for record in result.records],
    }


def _timeline(ranks: Sequence[RankRecord], result: Result) -> dict[str, Any] | None:
    """The picture of the traced call; None where there is no trace: on the serial path and on GPUs."""
    if not result.has_trace:
        return None
    picture = make_picture(ranks, result, PICTURE_SLOTS)
    lanes = [{"rank": lane.rank, "block": lane.name, "letters": lane.letters} for lane in picture.lanes]
    return {"milliseconds": picture.milliseconds, "slots": picture.slots, "lanes": lanes}


def write_json(path: str, content: dict[str, Any]) -> None:
    """Writes beside the place and renames: a reader never sees half a file. Raises OSError."""
    target = Path(path).absolute()
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(_finite(content), file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _finite(value: Any) -> Any:
    """JSON has no NaN: the text "nan" instead, so that a wrong result is seen and the file can be read."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
