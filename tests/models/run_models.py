"""Model-checks the protocols: runs Spin on every model and every mutant beside this file. Needs spin and gcc, no package.

    python tests/models/run_models.py                      all checks, a table on the screen, exit status 1 on a surprise
    python tests/models/run_models.py --only slot          those of one model
    python tests/models/run_models.py --write              also benchmarks/results/model_checking.json and docs/protocols.md
    python tests/models/run_models.py --trace slot/SIGNAL_FIRST    a shortest run that refutes the mutant, step by step

What is checked stands in the models as lines that begin with //@ (see model_checks.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import model_page as page  # noqa: E402
from model_checks import MODELS, Check, all_checks  # noqa: E402

MEMORY_MB = 1024       # of one search; pan ends with a message beyond it
SEARCH_S = 240.0       # of one search
COMPILE_S = 60.0
DEPTH = 200_000        # steps of one run of the model
HASH_BITS = 20


@dataclass
class Result:
    """What Spin said about one check.

    verdict  "holds", "assertion", "deadlock", "cycle" (a run that never ends) or "incomplete: ..." (no verdict)
    ends     for a check that should hold: no run is infinite, searched separately
    """

    model: str
    name: str
    verdict: str
    states: int
    transitions: int
    depth: int
    seconds: float
    ends: bool | None = None
    unreached: tuple[str, ...] = ()

    def as_expected(self, check: Check) -> bool:
        return self.verdict == check.expected and self.ends is not False


def missing_tools() -> list[str]:
    """Programs that the checks need and the machine lacks."""
    return [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


def _limits() -> None:
    os.nice(5)
    ceiling = (MEMORY_MB + 512) << 20
    resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))


def _run(command: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """(exit status, all output). A time-out is status -1."""
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=timeout_s, preexec_fn=_limits)
    except subprocess.TimeoutExpired:
        return -1, f"stopped after {timeout_s:g} s"
    return done.returncode, done.stdout


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[0]


def _build(check: Check, folder: Path, *defines: str, large: bool = True) -> str | None:
    """Makes `pan`, the checker of one model; the text of what failed, or None. Small searches end before an optimiser does."""
    status, text = _run(["spin", "-a", *check.flags, str(check.path)], folder, COMPILE_S)
    if status != 0 or not (folder / "pan.c").exists():
        return f"spin: {_first_line(text)}"
    options = ["-O1" if large else "-O0", "-w", *defines, f"-DMEMLIM={MEMORY_MB}", "-DVECTORSZ=1024"]
    status, text = _run(["gcc", *options, "-o", "pan", "pan.c"], folder, COMPILE_S)
    return None if status == 0 else f"gcc: {_first_line(text)}"


def _number(phrase: str, text: str) -> float:
    """The number at {} in the first such phrase of the output of pan, 0 if there is none."""
    found = re.search(phrase.format(r"(\d+(?:\.\d+)?(?:e[+-]\d+)?)"), text)
    return float(found[1]) if found else 0.0


def verdict_of(status: int, text: str) -> str:
    """The verdict in the output of pan."""
    if "assertion violated" in text:
        return "assertion"
    if "invalid end state" in text.split("Full statespace search")[0]:
        return "deadlock"
    if "non-progress cycle" in text.split("Full statespace search")[0]:
        return "cycle"
    errors = re.search(r"errors: (\d+)", text)
    cut_short = any(sign in text for sign in ("search depth too small", "out of memory", "Search not completed"))
    if status != 0 or errors is None or cut_short:
        return "incomplete: " + (text.strip().splitlines() or ["no output"])[-1]
    return "holds" if errors[1] == "0" else "incomplete: unknown error of pan"


def _unreached(text: str) -> tuple[str, ...]:
    """Statements that no run came to, as "file:line", without the ends of processes."""
    found = re.findall(r"^\s+([\w./]+\.pml):(\d+), state \d+, \"(.*)\"", text, re.MULTILINE)
    return tuple(sorted({f"{Path(name).name}:{line}" for name, line, what in found if what != "-end-"}))


def run_check(check: Check) -> Result:
    """Checks one model or mutant in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="moe_tk_model_") as name:
        folder = Path(name)
        failure = _build(check, folder, "-DSAFETY", large=not check.is_mutant)
        if failure:
            return Result(check.model, check.name, f"incomplete: {failure}", 0, 0, 0, 0.0)
        status, text = _run(["./pan", f"-m{DEPTH}", f"-w{HASH_BITS}"], folder, SEARCH_S)
        result = Result(check.model, check.name, verdict_of(status, text), states=int(_number("{} states, stored", text)),
                        transitions=int(_number("{} transitions", text)), depth=int(_number("depth reached {}", text)),
                        seconds=_number("elapsed time {} seconds", text), unreached=_unreached(text))
        if check.expected == "holds" and result.verdict == "holds":
            failure = _build(check, folder, "-DNP", large=result.states > 30_000)
            status, text = _run(["./pan", "-l", f"-m{DEPTH}", f"-w{HASH_BITS}"], folder, SEARCH_S)
            ending = failure or verdict_of(status, text)
            result.ends = ending == "holds"
            if not result.ends:
                result.verdict = ending if ending in ("cycle", "deadlock") else f"incomplete: {ending}"
        return result


def run_all(checks: Iterable[Check], *, jobs: int,
            on_result: Callable[[Check, Result], None] = lambda check, result: None) -> list[Result]:
    """Results in the order of `checks`, `jobs` at a time."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = [(check, pool.submit(run_check, check)) for check in checks]
        results = []
        for check, future in pending:
            results.append(future.result())
            on_result(check, results[-1])
        return results


def versions() -> dict[str, str]:
    """First line of what each tool says about itself."""
    questions = (("spin", "-V"), ("gcc", "--version"))
    return {tool: _first_line(_run([tool, option], Path.cwd(), COMPILE_S)[1]) for tool, option in questions}


def record_of(checks: list[Check], results: list[Result]) -> dict:
    """The committed form of the results: versions, and one row per check with what was expected and what was found."""
    rows = []
    for check, result in zip(checks, results, strict=True):
        found = {key: value for key, value in asdict(result).items() if key not in ("model", "name", "unreached")}
        rows.append({"model": check.model, "name": check.name, "expected": check.expected, "text": check.text,
                     "buglog": check.buglog, **found})
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"date": datetime.date.today().isoformat(), "machine": machine, "versions": versions(), "models": dict(MODELS),
            "checks": rows}


def show_trace(check: Check) -> int:
    """Prints a run that breaks a property, a shortest one if that search fits into memory; 1 if there is none."""
    with tempfile.TemporaryDirectory(prefix="moe_tk_model_") as name:
        folder = Path(name)
        for defines in (("-DSAFETY", "-DBFS"), ("-DSAFETY",)):
            if _build(check, folder, *defines):
                continue  # not every model can be searched breadth first
            status, text = _run(["./pan", f"-m{DEPTH}", f"-w{HASH_BITS}"], folder, SEARCH_S)
            trails = list(folder.glob("*.trail"))
            if trails:
                command = ["spin", "-t", "-p", "-g", "-l", "-k", str(trails[0]), *check.flags, str(check.path)]
                print(text.splitlines()[0], _run(command, folder, SEARCH_S)[1], sep="\n")
                return 0
            if verdict_of(status, text) == "holds":
                break
        print(f"{check.id}: no run that breaks a property was found")
        return 1


def _say(check: Check, result: Result) -> None:
    mark = "ok  " if result.as_expected(check) else "BAD "
    ends = "" if result.ends is None else ", every run ends" if result.ends else ", NOT EVERY RUN ENDS"
    search = f"{result.states:>8} states, depth {result.depth:>5}, {result.seconds:5.2f} s"
    print(f"{mark} {check.id:<42} {result.verdict:<10} {search}{ends}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a model, or model/check; may be given again")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="searches at a time")
    parser.add_argument("--write", action="store_true", help="write the committed results and the tables of the page")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--trace", help="model/check: print a shortest run that breaks a property")
    arguments = parser.parse_args()
    if missing := missing_tools():
        print(f"missing: {', '.join(missing)} (Debian, Ubuntu: apt-get install {' '.join(missing)})")
        return 2
    if arguments.trace:
        return show_trace(all_checks([arguments.trace])[0])
    checks = all_checks(arguments.only)
    results = run_all(checks, jobs=arguments.jobs, on_result=_say)
    bad = [c.id for c, r in zip(checks, results, strict=True) if not r.as_expected(c)]
    record = record_of(checks, results)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.write:
        if bad or arguments.only:
            print("not written: only whole runs without a surprise are")
            return 1
        page.RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        page.write_page(record)
    print(f"{len(checks)} checks, {len(bad)} surprises" + "".join(f"\n  {name}" for name in bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
