"""Small launches of every configuration, for compute-sanitizer (docs/engine.md gives the command). Also runs alone."""

from __future__ import annotations

import torch
from gemm_cases import Layout, oracle, quantised_operands, random_rows, relative_error

from moe_tk.ops import grouped_gemm, interleave_gate_up
from moe_tk.runtime import gemm

COUNTS = (70, 0, 130, 1)


def main() -> None:
    device, done = torch.device("cuda"), 0
    for dtype in ("bf16", "e4m3"):
        for variant in gemm.variants(device, dtype):
            layout = Layout(COUNTS, variant["block_m"], device)
            offsets, rows = layout.tensors()
            x = random_rows(layout, 384, torch.Generator(device).manual_seed(0))
            for swiglu in (False, True) if variant["swiglu"] else (False,):
                w = torch.randn(len(COUNTS), 512, 384, device=device) / 8
                arguments = {"activation": "swiglu" if swiglu else None, "expert_rows": rows, "row_block": layout.row_block,
                             "tile": variant["name"]}
                if dtype == "bf16":
                    x_values, w_values = x.bfloat16(), w.bfloat16()
                    prepared = interleave_gate_up(w_values) if swiglu else w_values
                    got = grouped_gemm(x_values, prepared, offsets, **arguments)
                else:
                    xq, x_scale, wq, pairs, x_values, w_values = quantised_operands(x, w, swiglu)
                    got = grouped_gemm(xq, wq, offsets, x_scale=x_scale, w_scale=pairs, **arguments)
                    got = got[0].float() * got[1].t().repeat_interleave(128, 1) if swiglu else got
                real, want = layout.real_rows(), oracle(x_values, w_values, layout, "swiglu" if swiglu else None, None)
                assert relative_error(got[real], want[real]) <= 0.035, (variant["name"], swiglu)
                done += 1
    torch.cuda.synchronize()
    print(f"{done} launches right")


if __name__ == "__main__":
    main()
