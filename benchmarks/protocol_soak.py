"""The long form of tests/native: the shipped protocols for 10^5 calls each, and mutated copies of the headers that must fail.

    PYTHONPATH=. python benchmarks/protocol_soak.py --calls 100000 --mutants --json benchmarks/results/protocol_soak.json

A run that fails ends the script with status 1; its seed is in the output, and the same options repeat it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests" / "native"))

from native_programs import RACE_STATUS, compile_command, run_program, verdict_of  # noqa: E402

from moe_tk.builder.toolchain import find_host_compiler  # noqa: E402

NEAR_WRAP = "first_epoch=0xffff8000"  # the 32768th call crosses 2^32
# (program, share of --calls, options)
SOAKS = (
    ("reorder", 1.0, ("wire=pcie", NEAR_WRAP)),
    ("reorder", 1.0, ("wire=pcie", "network=fences", "world=2")),
    ("reorder", 1.0, ("wire=nvlink", NEAR_WRAP)),
    ("reorder", 0.5, ("wire=pcie", "frozen=1")),
    ("reorder", 0.2, ("wire=pcie", "network=lossy", "pattern=two_kernel", "world=4")),
    ("plain", 1.0, ("wire=shm", NEAR_WRAP)),
    ("plain", 0.5, ("wire=nvlink", "pull=1")),
    ("threads", 0.2, ("wire=shm",)),
    ("threads", 0.2, ("wire=pcie",)),
    ("threads", 0.2, ("wire=nvlink", "frozen=1")),
    ("threads", 0.1, ("wire=shm", "pull=1", "world=4")),
)
LIMIT_S = 3 * 3600


@dataclass(frozen=True)
class Mutation:
    """A wrong copy of the shipped headers: (file, old text, new text) each, what finds it and how."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    program: str
    options: tuple[str, ...]
    found_as: tuple[str, ...]  # verdicts, or "race", or "problem"; any of them


HOST, ABORT, EXCHANGE = "tk_kernels/platform/atomics_host.hpp", "tk_kernels/protocol/abort.hpp", "tk_kernels/protocol/exchange.hpp"
WIRE, RING = "tk_kernels/protocol/wire.hpp", "tk_kernels/protocol/ring.hpp"
PLACE, COMBINE = "tk_kernels/roles/place_rows.hpp", "tk_kernels/roles/combine_jobs.hpp"
COUNT_ROW = "            protocol::count_ready(g.counters.arrived + block, 1);  // ORDER rows_ready: to counter_gate::wait\n"
COPY_ROW = "            std::memcpy(to, from, size_t(g.hidden) * sizeof(T));\n"
FREE_ROWS = """        for (int64_t j = 0; j < s.top_k; ++j) {
            const int64_t slot = s.slots[row * s.top_k + j];
            if (slot >= 0) ring.free_row(slot / s.row_block);
        }
"""
SUM_ROWS = "        if (!sum_slots<T>(state, row, sum)) return false;\n"
FILE = "if (file_record(context, record)"
PLAIN_WORD = ("platform::store_relaxed<scope::system>(slot + i, words[i])", "slot[i] = words[i]")
NO_BARRIER = ("if (!wait_for_previous_call(heap, epoch, context, site)) return false;", "")


def relaxed(operation: str, order: str) -> tuple[str, str, str]:
    """The host primitive without its order."""
    return HOST, f"{operation}std::memory_order_{order})", f"{operation}std::memory_order_relaxed)"


RACES, WRONG, PCIE = ("race",), ("wrong_data",), ("wire=pcie",)
MUTATIONS = (
    Mutation("additions neither acquire nor release", (relaxed("fetch_add(value, ", "acq_rel"),), "threads", ("calls=60",), RACES),
    Mutation("stores do not release", (relaxed("store(value, ", "release"),), "threads", ("calls=60",), RACES),
    Mutation("loads do not acquire", (relaxed("load(", "acquire"),), "threads", ("calls=60",), RACES),
    Mutation("reductions do not release", (relaxed("fetch_add(value, ", "release"),), "threads",
             ("wire=nvlink", "calls=60"), RACES),
    Mutation("record words are plain stores", ((ABORT, *PLAIN_WORD),), "threads", ("scenario=lost",), RACES),
    Mutation("row counted before it is copied", ((PLACE, COUNT_ROW, ""), (PLACE, COPY_ROW, COUNT_ROW + COPY_ROW)),
             "threads", ("calls=60",), RACES),
    Mutation("fence of pcie dropped", ((WIRE, "        Link::fence();\n", ""),), "reorder", ("wire=pcie", "network=fences"), WRONG),
    Mutation("previous call not awaited", ((EXCHANGE, *NO_BARRIER),), "reorder", PCIE, WRONG),
    Mutation("epoch not advanced", ((EXCHANGE, "call_epoch(context) + 1;", "call_epoch(context);"),), "reorder", PCIE, WRONG),
    Mutation("slots not refreshed", ((EXCHANGE, "if (refreshes(epoch))", "if (false)"),), "threads",
             ("scenario=idle", "calls=3"), WRONG),
    Mutation("ring entry not awaited", ((RING, "if (before < 0) return true;", "return true;"),), "reorder", PCIE, WRONG),
    Mutation("entry freed before it is read", ((COMBINE, SUM_ROWS, FREE_ROWS + SUM_ROWS),), "reorder", PCIE, WRONG),
    Mutation("abort not passed on", (
        (ABORT, FILE + ") raise_abort(context, kind);", FILE + " && kind != abort_kind::told_by_peer) raise_abort(context, kind);"),
        (ABORT, "    raise_abort(context, abort_kind(last.kind));\n",
         "    if (last.kind != uint32_t(abort_kind::told_by_peer)) raise_abort(context, abort_kind(last.kind));\n")),
        "threads", ("scenario=half_abort", "timeout_s=8"), ("problem",)),
)


def build(compiler: tuple[str, ...], program: str, folder: Path, root: Path = REPO) -> Path:
    target = folder / program
    done = subprocess.run(compile_command(compiler, program, target, root), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{program} of {root} does not compile:\n{done.stderr}")
    return target


def soak(program: Path, share: float, options: tuple[str, ...], calls: int, seed: int) -> dict:
    """One long run; its verdict with what was run and how long it took."""
    count = max(1, int(calls * share))
    begin = time.monotonic()
    done = run_program(program, *options, f"calls={count}", f"seed={seed}", "timeout_s=60", limit_s=LIMIT_S)
    result = verdict_of(done)
    passed = done.returncode == 0 and result["verdict"] == "passed"
    return {"program": program.name, "options": " ".join(options), "seed": seed, **result, "calls": count, "passed": passed,
            "data_races": done.returncode == RACE_STATUS if program.name == "threads" else None,
            "seconds": round(time.monotonic() - begin, 1)}


def how_found(done: subprocess.CompletedProcess) -> list[str]:
    found = ["race"] if done.returncode == RACE_STATUS and "data race" in done.stderr else []
    if done.stdout:
        result = verdict_of(done)
        found += [result["verdict"]] if result["verdict"] != "passed" else []
        found += ["problem"] if result.get("problem") else []
    return found


def try_mutation(compiler: tuple[str, ...], mutation: Mutation, folder: Path, seed: int) -> dict:
    """Makes the copy, compiles and runs it: `found` says by what it was found wrong."""
    root = folder / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(REPO / "tk_kernels", root / "tk_kernels")
    for name, old, new in mutation.edits:
        text = (root / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"mutation {mutation.name!r}: {old!r} is {text.count(old)} times in {name}, wanted once")
        (root / name).write_text(text.replace(old, new))
    program = build(compiler, mutation.program, folder, root)
    done = run_program(program, "calls=300", f"seed={seed}", "timeout_s=5", *mutation.options, limit_s=600)  # later options win
    found = how_found(done)
    return {"name": mutation.name, "program": mutation.program, "options": " ".join(mutation.options), "seed": seed,
            "found_as": found, "refuted": bool(set(found) & set(mutation.found_as))}


class Results:
    """What has been run so far; written after every run, so that an interrupted script leaves what it has."""

    def __init__(self, target: Path | None, facts: dict) -> None:
        self.target, self.facts = target, {**facts, "runs": [], "mutants": []}

    def add(self, kind: str, line: dict) -> None:
        print(json.dumps(line), flush=True)
        self.facts[kind].append(line)
        if self.target:
            self.target.write_text(json.dumps(self.facts, indent=1) + "\n")

    def good(self) -> bool:
        runs, mutants = self.facts["runs"], self.facts["mutants"]
        passed, refuted = sum(run["passed"] for run in runs), sum(mutant["refuted"] for mutant in mutants)
        print(f"{passed} of {len(runs)} runs passed, {refuted} of {len(mutants)} mutants refuted")
        return passed == len(runs) and refuted == len(mutants)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000, help="calls of a full-length run; slower ones make a share of it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", action="store_true", help="also compile and refute mutated copies of the headers")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compiler = find_host_compiler().require()
    results = Results(args.json, {"date": datetime.date.today().isoformat(), "compiler": compiler.short_label,
                                  "cores": os.cpu_count(), "calls_asked_for": args.calls})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = {program: build(compiler.command, program, folder) for program in sorted({soak[0] for soak in SOAKS})}
        for program, share, options in SOAKS:
            results.add("runs", soak(programs[program], share, options, args.calls, args.seed))
        for mutation in MUTATIONS if args.mutants else ():
            results.add("mutants", try_mutation(compiler.command, mutation, folder, args.seed))
    return 0 if results.good() else 1


if __name__ == "__main__":
    sys.exit(main())
