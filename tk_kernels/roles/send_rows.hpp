// Role send: moves this rank's rows towards the ranks that want them. Waits for nobody.
#pragma once

#include "../protocol/dispenser.hpp"
#include "block.hpp"

namespace moe_tk::roles {

template <class T, class Wire, class Dispatch>
bool send_rows(block_state &state, protocol::dispenser &items) {
    const auto &g = state.globals;
    if (g.heap.world == 1) return true;
    const int64_t num_items = Dispatch::num_items(g);
    for (int64_t item = items.take(); item < num_items; item = items.take()) {
        if (protocol::aborted(g.wait)) return false;
        item_timer timer(state, phase_id::dispatch, item);
        Dispatch::template send<T, Wire>(state, item);
        protocol::note_progress(g.wait);
    }
    return true;
}

}  // namespace moe_tk::roles
