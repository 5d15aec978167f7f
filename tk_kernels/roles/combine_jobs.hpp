// Role combine: when all local slots of a source token are computed, weights and sums them and writes the partial row to
// the token's source rank, where the chunk's watermark tells that all rows of the chunk have come.
#pragma once

#include <algorithm>
#include <vector>

#include "../engine/element.hpp"
#include "../protocol/dispenser.hpp"
#include "../protocol/ready.hpp"
#include "../protocol/watermark.hpp"
#include "block.hpp"

namespace moe_tk::roles {

// Sums in the order of the token's choices (k), whatever the order in which tiles were finished: bitwise reproducible.
template <class T>
bool sum_slots(block_state &state, int64_t row, std::vector<float> &sum) {
    const auto &g = state.globals;
    const auto &s = g.schedule;
    const auto ring = g.ring();
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t j = 0; j < s.top_k; ++j) {
        const int64_t pair = row * s.top_k + j, slot = s.slots[pair];
        if (slot < 0) continue;
        const int64_t block = slot / s.row_block;
        // ORDER rows_ready: acquires what count_push releases after each column block of GEMM 2.
        if (!protocol::wait_ready(g.counters.l2_done + block, g.counters.l2_want[block], g.wait,
                                  state.site(phase_id::combine, role_id::combine, block, g.heap.rank))) return false;
        const float weight = g.pair_weights && !g.weights_before_l2 ? g.pair_weights[pair] : 1.0f;
        const T *from = static_cast<const T *>(g.expert_out) + (ring.entry(block) * s.row_block + slot % s.row_block) * g.out_width;
        for (int64_t c = 0; c < g.out_width; ++c) sum[size_t(c)] += weight * engine::to_float(from[c]);
    }
    return true;
}

template <class T, class Wire>
bool combine_jobs(block_state &state, protocol::dispenser &items) {
    const auto &g = state.globals;
    const auto &s = g.schedule;
    const auto ring = g.ring();
    const uint32_t epoch = protocol::call_epoch(g.wait);
    std::vector<float> sum(static_cast<size_t>(g.out_width));
    std::vector<T> partial(static_cast<size_t>(g.out_width));
    for (int64_t item = items.take(); item < s.num_jobs; item = items.take()) {
        item_timer timer(state, phase_id::combine, item);
        const int64_t row = s.job_order[item];
        const int source = int(row / s.tokens_per_rank);
        const int64_t token = row % s.tokens_per_rank, chunk = token / s.job_chunk;
        if (!sum_slots<T>(state, row, sum)) return false;
        timer.ready();
        std::transform(sum.begin(), sum.end(), partial.begin(), engine::from_float<T>);
        const int64_t bytes = g.out_width * int64_t(sizeof(T));
        Wire::put(g.heap.planes<T>(source, g.heap.rank, token, g.out_width), partial.data(), bytes);
        if (source != g.heap.rank) state.bytes_combined[size_t(source)] += bytes;
        for (int64_t j = 0; j < s.top_k; ++j) {
            const int64_t slot = s.slots[row * s.top_k + j];
            if (slot >= 0) ring.free_row(slot / s.row_block);
        }
        const int64_t counter = source * g.heap.job_chunks + chunk;
        // ORDER chunk_combined: to reduce_rows on the source rank.
        protocol::publish_job<Wire>(g.heap, source, chunk, g.counters.job_done + counter, g.counters.job_want[counter], epoch);
        protocol::note_progress(g.wait);
    }
    return true;
}

}  // namespace moe_tk::roles
