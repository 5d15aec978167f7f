// Role reduce: on the source rank, adds the partial rows of the contributing ranks, in rank order, into the result.
#pragma once

#include <algorithm>
#include <vector>

#include "../engine/element.hpp"
#include "../protocol/dispenser.hpp"
#include "../protocol/watermark.hpp"
#include "block.hpp"

namespace moe_tk::roles {

// ORDER chunk_combined: acquires the watermark of every rank that owes a row of this chunk.
template <class Wire>
bool wait_for_chunk(block_state &state, int64_t chunk, int64_t first, int64_t last) {
    const auto &g = state.globals;
    for (int from = 0; from < g.heap.world; ++from) {
        uint32_t owed = 0;
        for (int64_t t = first; t < last; ++t) owed += uint64_t(g.schedule.contributors[t]) >> from & 1;
        if (owed == 0) continue;
        if (!protocol::wait_chunk<Wire>(g.heap, from, chunk, owed, g.counters.received_want, g.wait,
                                        state.site(phase_id::reduce, role_id::reduce, chunk, from))) return false;
    }
    return true;
}

template <class T, class Wire>
bool reduce_rows(block_state &state, protocol::dispenser &items) {
    const auto &g = state.globals;
    const int64_t job_chunk = g.schedule.job_chunk;
    const int64_t num_chunks = (g.num_tokens + job_chunk - 1) / job_chunk;
    std::vector<float> sum(static_cast<size_t>(g.out_width));
    for (int64_t chunk = items.take(); chunk < num_chunks; chunk = items.take()) {
        item_timer timer(state, phase_id::reduce, chunk);
        const int64_t first = chunk * job_chunk, last = std::min(first + job_chunk, g.num_tokens);
        if (!wait_for_chunk<Wire>(state, chunk, first, last)) return false;
        timer.ready();
        for (int64_t t = first; t < last; ++t) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int from = 0; from < g.heap.world; ++from) {
                if (!(uint64_t(g.schedule.contributors[t]) >> from & 1)) continue;  // its plane holds an older call's row
                const T *plane = g.heap.planes<T>(g.heap.rank, from, t, g.out_width);
                for (int64_t c = 0; c < g.out_width; ++c) sum[size_t(c)] += engine::to_float(plane[c]);
            }
            T *out = static_cast<T *>(g.out) + t * g.out_width;
            std::transform(sum.begin(), sum.end(), out, engine::from_float<T>);
        }
        protocol::note_progress(g.wait);
    }
    return true;
}

}  // namespace moe_tk::roles
