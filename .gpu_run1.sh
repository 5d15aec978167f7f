export PYTHONPATH=$PWD
t0=$(date +%s)
timeout 90 python -c "from moe_tk.runtime.nvlink import nvlink_module as m; print(m().variants(True))" || exit 1
echo built $(( $(date +%s) - t0 ))
timeout 60 python -c "
from tests.cuda.ranks import run_ranks
print(run_ranks('checks_fp8.exported_rows,checks_fp8.given_scales,checks_fp8.layer_against_reference,checks_fp8.back_to_back,checks_fp8.graphs,checks_fp8.refusals', world=2, timeout_s=50))" 2>&1 | tail -60
echo checked $(( $(date +%s) - t0 ))
timeout 50 torchrun --nproc-per-node 2 benchmarks/nvlink_layer.py --dtype fp8 --shapes qwen3-30b-a3b,seed --modes ep --graphs 1 --repeats 10 --json $OUT/a.json 2>&1 | grep -v "^\*\|OMP" | tail -30
echo end $(( $(date +%s) - t0 ))
