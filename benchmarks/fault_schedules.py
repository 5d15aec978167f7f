"""Random faults on the whole layer, by seed: who dies, stops, lags or raises, where and when, and what the others do.

Each schedule starts its own ranks (2 to 8), strikes one of them in a random phase of a random call, and checks what
tests/faults checks: errors of the right class with the right names in time, no wrong result, further calls refused, a
new group of the survivors works, no process and no shared memory left. The exit status is 1 if any schedule failed.

    PYTHONPATH=. python benchmarks/fault_schedules.py --json benchmarks/results/fault_schedules.json
    PYTHONPATH=. python benchmarks/fault_schedules.py --first 137 --schedules 1      # one seed again
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "faults")]
from fault_lab import Verdict, play  # noqa: E402
from fault_scenarios import DEATH_LIMIT_S, STALL_LIMIT_S, random_scenario  # noqa: E402

from moe_tk import __version__  # noqa: E402


def machine() -> dict:
    """What the latencies depend on."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return dict(cpu=names[0] if names else platform.machine(), cores=os.cpu_count(), system=platform.system(),
                kernel=platform.release(), load_average=[round(load, 1) for load in os.getloadavg()])


def one(seed: int) -> Verdict:
    """The judged scenario of a seed, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="moe_tk_faults_") as folder:
        os.environ["MOE_TK_RECORD_DIR"] = folder
        return play(random_scenario(seed), Path(folder))


def latencies(verdicts: list[Verdict]) -> dict[str, dict]:
    """By kind of fault: seconds from the fault to the error, over all ranks that were to fail, less the limit for stalls."""
    found: dict[str, list[float]] = {}
    for verdict in verdicts:
        scenario = verdict.scenario
        limit = scenario.timeout_s if scenario.action == "stop" else 0.0
        for rank, seconds in verdict.latencies_s.items():
            if rank != scenario.victim:
                found.setdefault(scenario.action, []).append(seconds - limit)
    return {action: dict(errors=len(values), median_s=round(statistics.median(values), 3), max_s=round(max(values), 3))
            for action, values in sorted(found.items())}


def show(verdicts: list[Verdict], console: Console) -> None:
    table = Table("fault", "schedules", "passed", "errors", "median s", "max s", title="random fault schedules",
                  caption="seconds from the fault (stop: from the end of timeout_s) to the error on the other ranks")
    seconds = latencies(verdicts)
    for action in sorted({verdict.scenario.action for verdict in verdicts}):
        mine = [verdict for verdict in verdicts if verdict.scenario.action == action]
        row = seconds.get(action)
        table.add_row(action, str(len(mine)), str(sum(not verdict.problems for verdict in mine)),
                      *([str(row["errors"]), f"{row['median_s']:.3f}", f"{row['max_s']:.3f}"] if row else ["", "", ""]))
    console.print(table)


def record(verdicts: list[Verdict], before: dict) -> dict:
    """The content of the result file."""
    return dict(
        benchmark="fault_schedules", date=datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        command=shlex.join(["python", *sys.argv]), machine=before,
        versions=dict(moe_tk=__version__, python=platform.python_version(), torch=torch.__version__),
        limits=dict(after_a_death_s=DEATH_LIMIT_S, after_timeout_s=STALL_LIMIT_S),
        schedules=len(verdicts), passed=sum(not verdict.problems for verdict in verdicts), latencies=latencies(verdicts),
        rows=[verdict.as_json() for verdict in verdicts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed; the others follow")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    console, before, verdicts = Console(), machine(), []
    for seed in range(args.first, args.first + args.schedules):
        verdicts.append(one(seed))
        scenario, problems = verdicts[-1].scenario, verdicts[-1].problems
        console.print(f"seed {seed}: {scenario.action} of rank {scenario.victim} of {scenario.world}, {scenario.pattern} "
                      f"{scenario.mode}, {scenario.phase} {scenario.point}: {'; '.join(problems) or 'as it should be'}",
                      highlight=False, markup=False)
    show(verdicts, console)
    if args.json:
        args.json.write_text(json.dumps(record(verdicts, before), indent=1) + "\n")
        console.print(f"wrote {args.json}")
    return 1 if any(verdict.problems for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
