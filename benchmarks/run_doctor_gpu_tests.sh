#!/usr/bin/env bash
# The doctor's GPU tests on a machine with two GPUs, then one full probe. Run from the root of the checkout.
#   benchmarks/run_doctor_gpu_tests.sh [OUT]   results and one log go to OUT (default: $OUT, else doctor_out)
# Reads the GPUs' settings and changes none. Goes on when a part fails. A minute and a quarter; no part may hang it.
set -u
out=${1:-${OUT:-doctor_out}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
MOE_TK_CACHE_DIR=${MOE_TK_CACHE_DIR:-$(mktemp -d)}
export MOE_TK_CACHE_DIR
python=${PYTHON:-python3}
summary=()
exec > >(tee -a "$out/log.txt") 2>&1

part() { # part NAME SECONDS COMMAND...: runs it under a limit, notes its status, never stops the script
    local name=$1 seconds=$2 began=$SECONDS status
    shift 2
    echo "=== $name"
    timeout --kill-after=5 "$seconds" "$@"
    status=$?
    summary+=("$name: status $status, $((SECONDS - began)) s")
}

mapped='import re
def mapped(when): print(when, sorted(set(re.findall(r"libcuda\S*|libnvidia-ml\S*", open("/proc/self/maps").read()))))
import pynvml as n; n.nvmlInit(); mapped("after nvmlInit:"); n.nvmlSystemGetDriverVersion()
h = n.nvmlDeviceGetHandleByIndex(0); n.nvmlDeviceGetName(h); n.nvmlDeviceGetMemoryInfo(h); mapped("after simple queries:")
n.nvmlDeviceGetCudaComputeCapability(h); mapped("after compute capability:")
from moe_tk.diagnose import diagnose; diagnose(); mapped("after diagnose:")'
part "machine" 20 nvidia-smi --query-gpu=name,driver_version,pci.bus_id --format=csv,noheader
part "who maps libcuda" 20 "$python" -c "$mapped"
part "build" 60 "$python" -m moe_tk build --arch 90a
part "GPU tests" 75 "$python" -m pytest -q -p no:cacheprovider -m "gpu or multi_gpu" tests/doctor --tb=short \
    --durations=5 --junitxml="$out/gpu_tests.xml"
part "probe" 60 bash -c "$python -m moe_tk doctor --probe --json --debug --limit 45 --group 2 --save '$out/doctor_h200_x2.json' > /dev/null"
part "kept, 80 columns" 15 "$python" -m moe_tk doctor --debug --width 80 --group 2
echo "=== summary"
printf '%s\n' "${summary[@]}"
sleep 1 # the log's tee
