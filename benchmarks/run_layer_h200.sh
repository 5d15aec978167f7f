#!/usr/bin/env bash
# The layer against torch and Triton on a machine with two GPUs, and where its time goes. Run from the root of the checkout.
#   benchmarks/run_layer_h200.sh [OUT] [table|inside|both]    results go to OUT (default: $OUT, else layer_out)
# table: seed and qwen3, EP and TP, T = 64 .. 8192: layer_bench_h200_x2.json and layer_bench.svg; about 25 s and the build.
# inside: --attribute and --sweep of qwen3 at T = 64 and 2048: layer_inside_h200_x2.json; about 25 s and the build.
# A copy without git takes its commit from MOE_TK_COMMIT. Goes on when a part fails.
set -u
out=${1:-${OUT:-layer_out}} what=${2:-both}
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
bench() { # bench SECONDS ARGUMENTS...
    timeout --kill-after=5 "$1" "${PYTHON:-python3}" -m moe_tk bench layer "${@:2}" || echo "status $?"
}
[ "$what" = inside ] || bench "${TABLE_LIMIT_S:-120}" --shape qwen3,seed --tokens 64,512,2048,8192 --rounds 9 --pause-ms 1 \
    --against torch,triton --json "$out/layer_bench_h200_x2.json" --plot "$out/layer_bench.svg"
[ "$what" = table ] || bench "${INSIDE_LIMIT_S:-120}" --shape qwen3 --tokens 64,2048 --rounds 9 --pause-ms 1 --pattern two_kernel \
    --against none --attribute --sweep comm-sms --json "$out/layer_inside_h200_x2.json"
