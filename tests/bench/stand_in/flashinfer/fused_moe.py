"""The fused layer, expert by expert in float32. Checks its arguments as the library does, or more strictly."""

import torch

STATE = {"tuning": False}
TUNED = set()  # (rows, tune_max_num_tokens) of calls within autotune
BYTES_PER_ROW = 3


def cutlass_fused_moe_workspace_size(max_num_tokens, hidden_size, intermediate_size, num_experts_total, top_k, *, x_dtype,
                                     weight_dtype, output_dtype=torch.bfloat16, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0,
                                     device=None):
    assert x_dtype == weight_dtype == output_dtype == torch.bfloat16 and device is not None
    assert num_experts_total % ep_size == 0 and 0 <= ep_rank < ep_size and 0 <= tp_rank < tp_size
    return BYTES_PER_ROW * max_num_tokens * top_k + hidden_size + intermediate_size + num_experts_total


def cutlass_fused_moe(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
                      quant_scales, fc1_expert_biases=None, fc2_expert_biases=None, tp_size=1, tp_rank=0, ep_size=1, ep_rank=0,
                      output=None, tune_max_num_tokens=8192, workspace_buffer=None):
    x, ids, scales, w31, w2 = input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights
    rows, hidden = x.shape
    experts, top_k, inter = w2.shape[0], ids.shape[1], w2.shape[2]
    assert x.dtype == w31.dtype == w2.dtype == output_dtype == torch.bfloat16
    assert ids.dtype == torch.int32 and scales.dtype == torch.float32 and scales.shape == ids.shape == (rows, top_k)
    assert w31.shape == (experts, 2 * inter, hidden) and w2.shape == (experts, hidden, inter) and not inter % 8 and not hidden % 8
    assert output.shape == x.shape and output.dtype == output_dtype and not list(quant_scales)
    assert all(part.is_contiguous() for part in (x, ids, scales, w31, w2, output))
    assert min(tp_size, ep_size) == 1 and 0 <= tp_rank < tp_size and 0 <= ep_rank < ep_size
    if workspace_buffer is not None:
        want = cutlass_fused_moe_workspace_size(
            rows, hidden, inter, experts * ep_size, top_k, x_dtype=x.dtype, weight_dtype=w2.dtype, tp_size=tp_size, tp_rank=tp_rank,
            ep_size=ep_size, ep_rank=ep_rank, device=x.device)
        assert workspace_buffer.dtype == torch.uint8 and workspace_buffer.dim() == 1 and workspace_buffer.numel() >= want
    if STATE["tuning"]:
        TUNED.add((rows, tune_max_num_tokens))
    assert any(most >= rows for _, most in TUNED), "a call that nothing was tuned for"
    total = torch.zeros(rows, hidden)
    for expert in range(experts):
        token, choice = torch.where(ids == experts * ep_rank + expert)
        up, gate = (x[token].float() @ w31[expert].float().T).chunk(2, dim=1)
        act = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).float()
        total.index_add_(0, token, (act @ w2[expert].float().T) * scales[token, choice, None])
    output.copy_(total)
    return [output]
