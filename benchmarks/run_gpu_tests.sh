#!/usr/bin/env bash
# All tests marked gpu or multi_gpu, with a log for benchmarks/results. Run from the root of the checkout.
#   benchmarks/run_gpu_tests.sh LOG [LIMIT_S [pytest arguments]]   e.g. ... gpu_tests.txt 240 tests/cuda tests/layer
# LOG gets commit, date, GPUs, driver, versions, every test with its outcome, and counts by file. COMMIT names the commit where the
# checkout has no .git. Ends with pytest's status (124: the limit was over). Reads the GPUs' settings and changes none.
set -u
log=${1:?usage: benchmarks/run_gpu_tests.sh LOG [LIMIT_S [pytest arguments]]}
limit=${2:-600}
shift $(($# < 2 ? $# : 2))
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
[ -n "$(git status --porcelain 2>/dev/null)" ] && commit="$commit and changes"
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

versions='import sys, torch; print(f"python {sys.version.split()[0]}, torch {torch.__version__}")'
counts='import collections, sys, xml.etree.ElementTree as tree
kinds = ("passed", "failed", "error", "skipped")
files = collections.defaultdict(collections.Counter)
for case in tree.parse(sys.argv[1]).iter("testcase"):
    tags = {child.tag for child in case}
    kind = "failed" if "failure" in tags else "error" if "error" in tags else "skipped" if "skipped" in tags else "passed"
    files[case.get("classname")][kind] += 1
for name in sorted(files):
    print(f"{name:50}", *(f"{files[name][kind]:4} {kind}" for kind in kinds))
total = sum(files.values(), collections.Counter())
print("all".ljust(50), *(f"{total[kind]:4} {kind}" for kind in kinds))'

{
    echo "commit:  $commit"
    echo "date:    $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "GPUs:    $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sort | uniq -c | sed 's/^ *//')"
    echo "python:  $("$python" -c "$versions")"
    echo "command: pytest -m 'gpu or multi_gpu' $*"
} | tee "$log"
began=$SECONDS
timeout --kill-after=10 "$limit" "$python" -m pytest -v -p no:cacheprovider -m "gpu or multi_gpu" --tb=short --durations=15 \
    --junitxml="$folder/junit.xml" "$@" 2>&1 | tee -a "$log"
status=${PIPESTATUS[0]}
{
    echo "=== by file"
    [ -f "$folder/junit.xml" ] && "$python" -c "$counts" "$folder/junit.xml"
    echo "status $status after $((SECONDS - began)) s"
} | tee -a "$log"
exit "$status"
