export PYTHONPATH=$PWD
t0=$(date +%s)
timeout 90 python -c "from moe_tk.runtime.nvlink import nvlink_module as m; m()" || exit 1
echo built $(( $(date +%s) - t0 ))
timeout 40 python -c "
from tests.cuda.ranks import run_ranks
print(run_ranks('checks_fp8.sent_rows,checks_fp8.given_scales,checks_fp8.layer_against_reference,checks_fp8.back_to_back,checks_fp8.graphs,checks_fp8.refusals', world=2, timeout_s=35))" 2>&1 | grep -v Warning | cut -c1-400 | tail -60
echo checked $(( $(date +%s) - t0 ))
timeout 40 torchrun --nproc-per-node 2 benchmarks/nvlink_layer.py --dtype fp8 --shapes qwen3-30b-a3b,seed,deepseek-v4-flash --modes ep --graphs 1 --repeats 10 --json $OUT/a.json 2>&1 | grep shape
echo bench $(( $(date +%s) - t0 ))
V=2 timeout 40 torchrun --nproc-per-node 2 benchmarks/nvlink_layer.py --dtype fp8 --shapes qwen3-30b-a3b,seed,deepseek-v4-flash --tokens 2048,8192 --modes ep --graphs 1 --repeats 10 --json $OUT/b.json 2>&1 | grep shape
echo end $(( $(date +%s) - t0 ))
