#!/usr/bin/env bash
# Everything about the layer over NVLink that wants two GPUs, in one go; goes on when a part fails. Run from the root of the checkout.
#   benchmarks/run_all_h200.sh [OUT [PART...]]    results go to OUT (default: $OUT, else gpu_out); default: all parts in this order
# build (90 s), checks (60 s), layer (30 s), patterns (35 s), bench (50 s), attribute (60 s), routings (60 s, and 20 s for each of
# ROUTING_FILES="FILE:SHAPE .."), fp8 (25 s), patterns_fp8 (80 s), dense (20 s), trace (50 s), suite (300 s), sanitize (160 s); the
# seconds are limits, for what build has built. A copy without git takes its commit from MOE_TK_COMMIT.
set -u
out=$(mkdir -p "${1:-${OUT:-gpu_out}}" && cd "${1:-${OUT:-gpu_out}}" && pwd)
parts=("${@:2}")
[ ${#parts[@]} -gt 0 ] || parts=(build checks layer patterns bench attribute routings fp8 patterns_fp8 dense trace suite sanitize)
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}
commit=${MOE_TK_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
ranks() { timeout --kill-after=5 "$1" "$python" -m torch.distributed.run --nproc-per-node 2 "${@:2}"; }

build() { timeout 90 "$python" -m tests.build_modules; }  # the layer, traced and not, the plain GEMMs, the probes: no later part compiles
checks() {  # what a change of the kernels breaks first; the suite has the rest
    local names=tables,layer_against_reference,graphs,refusals,two_passes,checks_variants:bf16,checks_variants:e4m3
    names+=,checks_serial:against_reference,checks_serial:mixed_patterns,checks_serial:missing_rank
    names+=,checks_serial_fp8:against_reference,checks_serial_fp8:mixed_patterns
    names+=,checks_fp8:sent_rows,checks_fp8:layer_against_reference,checks_ops:dense,checks_ops:routed,checks_ops_fp8:routed,checks_dense_fp8:dense
    timeout 60 "$python" -m tests.cuda.ranks $names 2 55
}
layer() {
    ranks 30 benchmarks/nvlink_layer.py --shapes qwen3-30b-a3b,seed --modes ep,tp --graphs 1 --repeats 10 --json "$out/nvlink_layer.json"
}
patterns() {
    ranks 35 benchmarks/nvlink_patterns.py --shapes qwen3-30b-a3b,seed,mixtral-8x7b,deepseek-v4-flash,deepseek-v3 --modes ep,tp \
        --tokens 1,64,512,2048,8192 --routings uniform,zipf --repeats 7 --seconds 25 --commit "$commit" --json "$out/nvlink_patterns.json"
}
bench() { TABLE_LIMIT_S=50 bash benchmarks/run_layer_h200.sh "$out" table; }
attribute() { INSIDE_LIMIT_S=60 bash benchmarks/run_layer_h200.sh "$out" inside; }
routings() { ROUTINGS_LIMIT_S=60 bash benchmarks/run_layer_h200.sh "$out" routings; }
fp8() {
    ranks 25 benchmarks/nvlink_layer.py --dtype fp8 --shapes qwen3-30b-a3b,seed,deepseek-v4-flash,mixtral-8x7b --modes ep --graphs 1 --repeats 10 \
        --json "$out/nvlink_fp8.json"
}
patterns_fp8() {
    ranks 80 benchmarks/nvlink_patterns.py --dtype fp8 --shapes qwen3-30b-a3b,seed,mixtral-8x7b,deepseek-v4-flash,deepseek-v3 \
        --tokens 64,512,2048,8192 --repeats 7 --seconds 60 --commit "$commit" --json "$out/nvlink_patterns_fp8.json"
}
dense() { ranks 20 benchmarks/dense_nvlink.py --json "$out/dense_nvlink.json"; }
trace() {
    timeout 50 "$python" -m moe_tk trace --shape qwen3-30b-a3b,seed --tokens 512,2048,8192 --mode ep,tp --out "$out/trace.json.gz" \
        --blocks 16 --picture "$out/trace.svg" --json "$out/trace_summary.json"
}
suite() { COMMIT=$commit bash benchmarks/run_gpu_tests.sh "$out/gpu_tests.txt" 300; }
# sanitized TOOL SECONDS GPU ARGUMENT...: of the kernels only this project's are checked. Their names are mangled: at:: is in none. API
# errors are not: torch asks in that way whether there is a fabric.
sanitized() {
    timeout --kill-after=5 $(($2 + 20)) compute-sanitizer --tool "$1" --port $((49152 + 50 * $3)) --prefix "=== $1 on GPU $3:" \
        --kernel-name kernel_substring=moe_tk --report-api-errors no --error-exitcode 9 "$python" -m tests.cuda.sanitize_cases --seconds "$2" "${@:4}"
}
all_of() { # all_of PROCESS...: the status of one that failed, or 0
    local status=0 process
    for process in "$@"; do wait "$process" || status=$?; done
    return $status
}
for_racecheck() { NVCC_APPEND_FLAGS=-DMOE_TK_RACECHECK MOE_TK_CACHE_DIR=$cache "$@"; }  # gemm_config.cuh says why
sanitize() {  # two tools side by side, each on a GPU of its own; then one on both ranks
    local store status=0 first cache
    store=$(mktemp -u) cache=$(mktemp -d)
    for_racecheck timeout 90 "$python" -c "from moe_tk.runtime.nvlink import nvlink_module; nvlink_module()"
    CUDA_VISIBLE_DEVICES=0 sanitized memcheck 60 0 & first=$!
    CUDA_VISIBLE_DEVICES=1 for_racecheck sanitized racecheck 60 1 --small & all_of $first $! || status=$?
    rm -rf "$cache"
    sanitized memcheck 40 0 0 2 "$store" & first=$!
    sanitized memcheck 40 1 1 2 "$store" & all_of $first $! || status=$?
    return $status
}

for part in "${parts[@]}"; do
    began=$SECONDS
    "$part" >"$out/$part.log" 2>&1
    echo "$part: status $? after $((SECONDS - began)) s" | tee -a "$out/parts.log"
done
