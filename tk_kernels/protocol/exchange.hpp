// The first step of every call: each rank tells all ranks what it is about to do and where its tokens want to go.
// All ranks then hold the same headers and the same routing, and so come to the same decision without asking again.
#pragma once

#include <cstdint>

#include "../platform/fault_points.hpp"
#include "barrier.hpp"
#include "heap.hpp"
#include "wait.hpp"

namespace moe_tk::protocol {

struct routing_view {
    const int32_t *topk_ids = nullptr;   // [num_tokens, top_k], null if the call has no routing
    const float *topk_weights = nullptr; // [num_tokens, top_k]
    int64_t num_tokens = 0;
    int64_t top_k = 0;
};

// Puts the call before this one into the slots that a call may leave alone. The owner may do so while no peer may write
// them: after the barrier, before it has posted.
// ORDER refresh: the release of posted() carries these stores to every writer of the slots.
template <class Wire>
MOE_TK_FN void refresh_slots(const symmetric_heap &heap, uint32_t epoch) {
    uint32_t *sent = heap.sent(heap.rank, 0, 0), *combined = heap.combined(heap.rank, 0, 0);
    for (int64_t i = 0; i < heap.world * heap.send_chunks; ++i) platform::store_relaxed<scope::system>(sent + i, epoch - 1);
    if constexpr (!Wire::COUNTS) {  // else these are counters, not epochs
        for (int64_t i = 0; i < heap.world * heap.job_chunks; ++i) platform::store_relaxed<scope::system>(combined + i, epoch - 1);
    }
}

template <class Wire>
MOE_TK_FN void post_header(const symmetric_heap &heap, const call_header &header, const routing_view &routing, uint32_t epoch) {
    const bool fits = !header.refused && routing.topk_ids && routing.num_tokens <= heap.max_tokens;
    const int64_t pairs = fits ? routing.num_tokens * routing.top_k : 0;
    for (int distance = 0; distance < heap.world; ++distance) {
        MOE_TK_FAULT_POINT(phase_id::exchange)
        const int to = (heap.rank + distance) % heap.world;
        if (pairs > 0) {
            Wire::put(heap.topk_ids(to, heap.rank, routing.top_k), routing.topk_ids, pairs * 4);
            Wire::put(heap.topk_weights(to, heap.rank, routing.top_k), routing.topk_weights, pairs * 4);
        }
        Wire::put(heap.header(to, heap.rank), &header, sizeof(header));
        Wire::signal(heap.posted(to, heap.rank), epoch);
    }
}

// Opens the next call: moves the epoch on and tells all ranks. By one thread per rank.
// ORDER header: put, then signal(posted); pairs with wait_for_all(posted) at the owner.
template <class Wire>
MOE_TK_FN bool exchange_headers(const symmetric_heap &heap, const call_header &header, const routing_view &routing,
                                const wait_context &context, wait_site site) {
    const uint32_t epoch = call_epoch(context) + 1;
    platform::store_relaxed<scope::device>(context.epoch_word, epoch);
    if (!wait_for_previous_call(heap, epoch, context, site)) return false;
    if (refreshes(epoch)) refresh_slots<Wire>(heap, epoch);
    post_header<Wire>(heap, header, routing, epoch);
    site.phase = phase_id::exchange;
    return wait_for_all(heap, heap.offset.posted, epoch, context, site);
}

}  // namespace moe_tk::protocol
