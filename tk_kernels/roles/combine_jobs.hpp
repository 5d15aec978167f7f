// Role combine: when all local slots of a source token are computed, weights and sums them and writes the partial row to
// the token's source rank. The last job of a chunk, found by election, publishes the chunk's watermark there.
#pragma once

#include <algorithm>
#include <vector>

#include "../engine/element.hpp"
#include "../protocol/dispenser.hpp"
#include "../protocol/election.hpp"
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
        if (!protocol::spin_until(g.counters.l2_done + block, g.counters.l2_want[block], g.wait,
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
            // ORDER ring_free: releases the entry to ring_pool::wait_free.
            if (slot >= 0) platform::fetch_add_acq_rel<scope::device>(g.counters.freed + slot / s.row_block, 1u);
        }
        const int64_t counter = source * g.heap.job_chunks + chunk;
        if (protocol::elect_last(g.counters.job_done + counter, 1u, g.counters.job_want[counter])) {
            // ORDER chunk_combined: to reduce_rows on the source rank.
            Wire::signal(g.heap.combined(source, g.heap.rank, chunk), g.wait.epoch);
        }
        protocol::note_progress(g.wait);
    }
    return true;
}

}  // namespace moe_tk::roles
