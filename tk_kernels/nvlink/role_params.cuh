// What the mover and the combine role are given, from a workspace and a call: the same in the fused and the serial pattern.
#pragma once

#include "combine.cuh"
#include "layer.cuh"
#include "pull_rows.cuh"

namespace moe_tk::nvlink {

inline pull_params pull_params_of(const workspace_view &w, const layer_call &call, int row_block) {
    return {.tokens = static_cast<const bf16 *>(call.hidden_states), .gathered = static_cast<bf16 *>(w.rows),
            .counts = w.tables.counts, .delivery_order = w.tables.delivery_order, .slots = w.tables.slots,
            .arrived = w.counters.arrived, .next_row = w.counters.next_row, .row_block = row_block};
}

// col_blocks: of GEMM 2, which a job waits for; 0 where GEMM 2 is over before the launch begins.
inline combine_params combine_params_of(const workspace_view &w, const layer_call &call, int row_block, int col_blocks) {
    return {.counts = w.tables.counts, .slots = w.tables.slots, .job_order = w.tables.job_order,
            .chunk_expected = w.tables.chunk_expected, .token_counts = w.tables.token_counts, .contributors = w.tables.contributors,
            .l2_done = w.counters.l2_done, .job_done = w.counters.job_done, .next_job = w.counters.next_job,
            .next_token = w.counters.next_token, .expert_out = static_cast<const bf16 *>(w.rows),
            .slot_weight = call.weights_before_l2 ? nullptr : w.tables.slot_weight, .out = static_cast<bf16 *>(call.out),
            .num_tokens = call.num_tokens, .row_block = row_block, .col_blocks = col_blocks};
}

}  // namespace moe_tk::nvlink
