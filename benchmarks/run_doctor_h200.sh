#!/usr/bin/env bash
# The doctor on a machine with two GPUs: probes, report, GPU tests. Run from the root of the checkout.
#   benchmarks/run_doctor_h200.sh [OUT]        results and one log go to OUT (default: $OUT, else doctor_out)
# Reads the GPUs' settings and changes none. Goes on when a part fails; the last lines say what did. Takes about 4 minutes.
set -u
out=${1:-${OUT:-doctor_out}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/log.txt
export PYTHONPATH=${PYTHONPATH:-.} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export MOE_TK_CACHE_DIR=${MOE_TK_CACHE_DIR:-$(mktemp -d)}
python=${PYTHON:-python3}
summary=()
exec > >(tee -a "$log") 2>&1

part() { # part NAME SECONDS COMMAND...: runs it under a limit, notes its status, never stops the script
    local name=$1 seconds=$2 began=$SECONDS status
    shift 2
    echo "=== $name"
    timeout --kill-after=10 "$seconds" "$@"
    status=$?
    summary+=("$name: status $status, $((SECONDS - began)) s")
    echo "--- $name: status $status"
}

part "machine" 60 bash -c 'uname -a; $0 --version; nvidia-smi; nvidia-smi topo -m; nvidia-smi topo -p2p r; nvidia-smi topo -p2p n
    nvidia-smi nvlink -s -i 0 | head -4; nvidia-smi nvlink -R -i 0 | head -4; which nvcc; cat /proc/driver/nvidia/version; exit 0' "$python"
part "build" 240 "$python" -c 'from moe_tk.topology.probe import build_probe_library; print(build_probe_library(["sm_90"]))'
part "record" 60 bash -c "$python tests/doctor/record_machine.py '2 x H200 on NVSwitch, in a virtual machine' > '$out/h200_x2.json'"
part "report without probes" 90 bash -c "$python -m moe_tk doctor --json --debug > '$out/doctor_unprobed.json'"
part "quick" 90 bash -c "$python -m moe_tk doctor --probe quick --debug --width 100"
part "probe" 200 bash -c "$python -m moe_tk doctor --probe --json --debug --limit 150 --group 2 --save '$out/doctor_h200_x2.json' > /dev/null"
part "kept, 80 columns" 60 bash -c "$python -m moe_tk doctor --debug --width 80 --group 2 | tee '$out/doctor_80.txt'"
part "kept, 160 columns" 60 bash -c "$python -m moe_tk doctor --debug --width 160 --group 2 > '$out/doctor_160.txt'"
part "GPU tests" 240 "$python" -m pytest -q -p no:cacheprovider -m "gpu or multi_gpu" tests/doctor \
    --junitxml="$out/gpu_tests.xml"
echo "=== summary"
printf '%s\n' "${summary[@]}"
sleep 1 # the log's tee
