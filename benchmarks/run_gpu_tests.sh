#!/usr/bin/env bash
# All tests marked gpu or multi_gpu, with a log for benchmarks/results. Run from the root of the checkout.
#   benchmarks/run_gpu_tests.sh LOG [LIMIT_S [pytest arguments]]   e.g. ... gpu_tests.txt 300 tests/cuda tests/layer
# All modules are built first, side by side; that is not in the limit.
# LOG gets commit, date, GPUs, driver, versions, every test with its outcome, each failure as it happens, the slowest tests, and counts
# by file. COMMIT names the commit where the checkout has no .git. Ends with pytest's status; 124: the limit was over, and pytest was
# interrupted, so that it still says what was slow, and ends its ranks. Reads the GPUs' settings and changes none.
set -u
log=${1:?usage: benchmarks/run_gpu_tests.sh LOG [LIMIT_S [pytest arguments]]}
limit=${2:-600}
shift $(($# < 2 ? $# : 2))
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
[ -n "$(git status --porcelain 2>/dev/null)" ] && commit="$commit and changes"
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}

versions='import sys, torch; print(f"python {sys.version.split()[0]}, torch {torch.__version__}")'
# A test that passes and fails in its teardown counts as both, as pytest counts.
counts='function line(file) {
    return sprintf("%-45s %4d passed %4d failed %4d errors %4d skipped", file, count[file, "PASSED"], count[file, "FAILED"],
                   count[file, "ERROR"], count[file, "SKIPPED"])
}
match($0, /::.* (PASSED|FAILED|ERROR|SKIPPED)/) && !/^(FAILED|ERROR) / {
    file = substr($0, 1, RSTART - 1); kind = substr($0, RSTART, RLENGTH); sub(/.* /, "", kind)
    seen[file] = 1; count[file, kind]++; count["all", kind]++
}
END {
    for (file in seen) print line(file) | "sort"
    close("sort"); print line("all")
}'
{
    echo "commit:  $commit"
    echo "date:    $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    echo "GPUs:    $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sort | uniq -c | sed 's/^ *//')"
    echo "python:  $("$python" -c "$versions")"
    echo "command: pytest -m 'gpu or multi_gpu' $*"
    "$python" -m tests.build_modules 2>&1
} | tee "$log"
began=$SECONDS
timeout --signal=INT --kill-after=10 "$limit" "$python" -m pytest -v -p no:cacheprovider -p tests.at_once -m "gpu or multi_gpu" \
    --tb=short --durations=30 "$@" 2>&1 | tee -a "$log"
status=${PIPESTATUS[0]}
{
    echo "=== by file"
    awk "$counts" "$log"
    echo "status $status after $((SECONDS - began)) s"
} | tee -a "$log"
exit "$status"
