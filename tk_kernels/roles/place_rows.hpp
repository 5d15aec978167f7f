// Role place: puts each arrived row into all its slots, in delivery order, and counts it in the row blocks' arrival counters.
#pragma once

#include <cstring>

#include "../protocol/dispenser.hpp"
#include "../protocol/ready.hpp"
#include "block.hpp"

namespace moe_tk::roles {

template <class T, class Dispatch>
const T *find_row(block_state &state, int64_t item, int64_t row) {
    const auto &g = state.globals;
    const int source = int(row / g.schedule.tokens_per_rank);
    const int64_t token = row % g.schedule.tokens_per_rank;
    if (source == g.heap.rank) return static_cast<const T *>(g.tokens) + token * g.hidden;
    return Dispatch::template locate<T>(state, source, token, g.schedule.delivery_pos[item]);
}

template <class T, class Dispatch>
bool place_rows(block_state &state, protocol::dispenser &items) {
    const auto &g = state.globals;
    const auto &s = g.schedule;
    const auto ring = g.ring();
    T *gathered = static_cast<T *>(g.gathered);
    for (int64_t item = items.take(); item < s.num_pull; item = items.take()) {
        item_timer timer(state, phase_id::dispatch, item);
        const int64_t row = s.delivery_order[item];
        const T *from = find_row<T, Dispatch>(state, item, row);
        if (!from) return false;
        for (int64_t j = 0; j < s.top_k; ++j) {
            const int64_t slot = s.slots[row * s.top_k + j];
            if (slot < 0) continue;
            const int64_t block = slot / s.row_block;
            if (!ring.wait_free(block, g.wait, state.site(phase_id::dispatch, role_id::place, block, g.heap.rank))) return false;
            timer.ready();
            T *to = gathered + (ring.entry(block) * s.row_block + slot % s.row_block) * g.hidden;
            std::memcpy(to, from, size_t(g.hidden) * sizeof(T));
            protocol::count_ready(g.counters.arrived + block, 1);  // ORDER rows_ready: to counter_gate::wait
        }
        protocol::note_progress(g.wait);
    }
    return true;
}

}  // namespace moe_tk::roles
