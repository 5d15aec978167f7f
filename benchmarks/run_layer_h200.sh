#!/usr/bin/env bash
# The layer on a machine with two GPUs: beside torch and Triton, where its time goes, what routing costs. Run from the root of the checkout.
#   benchmarks/run_layer_h200.sh [OUT [PART...]]    results go to OUT (default: $OUT, else layer_out); default: table inside
# table: seed and qwen3, EP and TP, T = 64 .. 8192: layer_bench_h200_x2.json and layer_bench.svg; about 25 s and the build.
# inside: --attribute and --sweep comm-sms of qwen3, bf16, at T = 64, 512, 2048: layer_inside_h200_x2.json; about 35 s and the build.
# routings: qwen3 and mixtral by synthetic ones, olmoe and a layer of 64 experts with top 6 by the traces that ship, all beside balanced:
#   layer_routings_synthetic.json, .._trace.json, .._flame.json; about 45 s and the build. ROUTING_FILES="FILE:SHAPE .." measures others, too,
#   which need not ship: FILE as for --routing, SHAPE as for --shape; layer_routings_FILE_SHAPE.json.
# Limits in seconds: TABLE_LIMIT_S, INSIDE_LIMIT_S, ROUTINGS_LIMIT_S (and 20 for each of ROUTING_FILES); what was measured before is in the
# JSON. A copy without git takes its commit from MOE_TK_COMMIT. Goes on when a part fails, and ends with status 1 then.
set -u
out=${1:-${OUT:-layer_out}} parts=("${@:2}") status=0
[ ${#parts[@]} -gt 0 ] || parts=(table inside)
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
bench() { # bench SECONDS ARGUMENTS...
    local found=124 # of timeout, where none is left
    if [ "$1" -gt 0 ]; then
        timeout --kill-after=5 "$1" "${PYTHON:-python3}" -m moe_tk bench layer --rounds 9 --pause-ms 1 "${@:2}"
        found=$?
    fi
    [ $found = 0 ] || { echo "status $found: ${*:2}" && status=1; }
}
table() {
    bench "${TABLE_LIMIT_S:-120}" --shape qwen3,seed --tokens 64,512,2048,8192 --against torch,triton \
        --json "$out/layer_bench_h200_x2.json" --plot "$out/layer_bench.svg"
}
inside() {
    bench "${INSIDE_LIMIT_S:-120}" --shape qwen3 --tokens 64,512,2048 --pattern two_kernel --against none --attribute --sweep comm-sms \
        --json "$out/layer_inside_h200_x2.json"
}
routings() {
    local ends=$((SECONDS + ${ROUTINGS_LIMIT_S:-120})) pair file shape name
    beside_balanced qwen3,mixtral synthetic uniform zipf zipf:2 hot hot_rank
    beside_balanced olmoe trace trace:0 trace:1 trace:2 trace:3
    beside_balanced 2048,1024,64,6 flame flame:0 flame:3 flame:7
    for pair in ${ROUTING_FILES:-}; do
        file=${pair%:*} shape=${pair##*:} ends=$((ends + 20))
        name=$(basename "${file%%#*}")
        beside_balanced "$shape" "${name%.*}_${shape//,/x}" "$file"
    done
}
beside_balanced() { # beside_balanced SHAPE NAME ROUTING...: until `ends`
    local each chosen=(--routing balanced)
    for each in "${@:3}"; do chosen+=(--routing "$each"); done
    bench $((ends - SECONDS)) --shape "$1" --mode both --tokens 512,2048 --pattern two_kernel,serial,auto --against none "${chosen[@]}" \
        --json "$out/layer_routings_$2.json"
}
for part in "${parts[@]}"; do
    case $part in
        table | inside | routings) "$part" ;;
        *) echo "no part $part: wanted table, inside, routings" && status=2 ;;
    esac
done
exit $status
