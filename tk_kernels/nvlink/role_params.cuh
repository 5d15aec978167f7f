// What roles are given that are the same in the fused and the serial pattern, from a workspace and a call: placing rows, combining.
#pragma once

#include "combine.cuh"
#include "layer.cuh"
#include "place_rows.cuh"

namespace moe_tk::nvlink {

template <class T> place_params<T> place_params_of(const workspace_view &w, const void *tokens, const slot_rows<T> &to) {
    return {.tokens = static_cast<const T *>(tokens), .to = to, .counts = w.tables.counts, .job_order = w.tables.job_order, .slots = w.tables.slots};
}

inline combine_params combine_params_of(const workspace_view &w, const layer_call &call, int row_block, int block_cols) {
    return {.counts = w.tables.counts, .slots = w.tables.slots, .job_order = w.tables.job_order,
            .chunk_expected = w.tables.chunk_expected, .token_counts = w.tables.token_counts, .contributors = w.tables.contributors,
            .l2_done = w.counters.l2_done, .job_done = w.counters.job_done, .next_item = w.counters.next_item,
            .expert_out = static_cast<const bf16 *>(w.expert_out), .slot_weight = call.weights_before_l2 ? nullptr : w.tables.slot_weight,
            .out = static_cast<bf16 *>(call.out), .num_tokens = call.num_tokens, .row_block = row_block,
            .tiles = tiles_of(w.call.hidden, block_cols)};
}

}  // namespace moe_tk::nvlink
