// How a row gets from its owner to the ranks that want it: written by the owner (push) or read by the receiver (pull).
// Both announce rows by chunk watermarks that the receiver polls in its own memory.
#pragma once

#include <algorithm>

#include "../roles/block.hpp"

namespace moe_tk::hooks {

using protocol::call_epoch;
using roles::block_state;

// The owner writes each wanted row once into the receiver's arrival area, in the receiver's delivery order.
struct push_rows {
    static int64_t num_items(const roles::launch_globals &g) {
        int64_t chunks = 0;
        for (int to = 0; to < g.heap.world; ++to) {
            if (to == g.heap.rank) continue;
            chunks = std::max<int64_t>(chunks, (g.schedule.send_count[to] + g.send_chunk - 1) / g.send_chunk);
        }
        return chunks * (g.heap.world - 1);
    }

    // Items run chunk by chunk over all receivers, each owner starting at its right neighbour, so that no receiver is flooded.
    template <class T, class Wire>
    static void send(block_state &state, int64_t item) {
        const auto &g = state.globals;
        const int others = g.heap.world - 1;
        const int to = int((g.heap.rank + 1 + item % others) % g.heap.world);
        const int64_t chunk = item / others, first = chunk * g.send_chunk;
        const int64_t last = std::min<int64_t>(first + g.send_chunk, g.schedule.send_count[to]);
        if (first >= last) return;
        const T *tokens = static_cast<const T *>(g.tokens);
        for (int64_t pos = first; pos < last; ++pos) {
            const int64_t token = g.schedule.send_order[to * g.schedule.tokens_per_rank + pos];
            Wire::put(g.heap.arrivals<T>(to, g.heap.rank, pos, g.hidden), tokens + token * g.hidden, g.hidden * int64_t(sizeof(T)));
        }
        state.bytes_dispatched[size_t(to)] += (last - first) * g.hidden * int64_t(sizeof(T));
        Wire::signal(g.heap.sent(to, g.heap.rank, chunk), call_epoch(g.wait));  // ORDER row_sent: to locate() at the receiver
    }

    // ORDER row_sent: acquires the watermark of the chunk; null on abort.
    template <class T>
    static const T *locate(block_state &state, int source, int64_t, int64_t pos) {
        const auto &g = state.globals;
        const int64_t chunk = pos / g.send_chunk;
        const auto site = state.site(protocol::phase_id::dispatch, protocol::role_id::place, chunk, source);
        if (!protocol::spin_until(g.heap.sent(g.heap.rank, source, chunk), call_epoch(g.wait), g.wait, site)) return nullptr;
        return g.heap.arrivals<T>(g.heap.rank, source, pos, g.hidden);
    }
};

// The owner exports its rows once in its own heap; each receiver reads what it wants. Needs a wire that allows remote loads.
struct pull_rows {
    static int64_t num_items(const roles::launch_globals &g) { return (g.num_tokens + g.send_chunk - 1) / g.send_chunk; }

    template <class T, class Wire>
    static void send(block_state &state, int64_t chunk) {
        static_assert(Wire::REMOTE_LOADS, "this wire must not read remote memory: use push_rows");
        const auto &g = state.globals;
        const int64_t first = chunk * g.send_chunk, last = std::min<int64_t>(first + g.send_chunk, g.num_tokens);
        Wire::put(g.heap.arrivals<T>(g.heap.rank, g.heap.rank, first, g.hidden), static_cast<const T *>(g.tokens) + first * g.hidden,
                  (last - first) * g.hidden * int64_t(sizeof(T)));
        for (int distance = 1; distance < g.heap.world; ++distance) {
            const int to = (g.heap.rank + distance) % g.heap.world;
            Wire::signal(g.heap.sent(to, g.heap.rank, chunk), call_epoch(g.wait));  // ORDER row_sent: to locate() at the receiver
        }
    }

    template <class T>
    static const T *locate(block_state &state, int source, int64_t token, int64_t) {
        const auto &g = state.globals;
        const int64_t chunk = token / g.send_chunk;
        const auto site = state.site(protocol::phase_id::dispatch, protocol::role_id::place, chunk, source);
        if (!protocol::spin_until(g.heap.sent(g.heap.rank, source, chunk), call_epoch(g.wait), g.wait, site)) return nullptr;
        state.bytes_dispatched[size_t(source)] += g.hidden * int64_t(sizeof(T));
        return g.heap.arrivals<T>(source, source, token, g.hidden);
    }
};

}  // namespace moe_tk::hooks
