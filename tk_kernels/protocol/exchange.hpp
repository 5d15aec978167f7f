// The first step of every call: each rank tells all ranks what it is about to do and where its tokens want to go.
// All ranks then hold the same headers and the same routing, and so come to the same decision without asking again.
#pragma once

#include <cstdint>

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

// ORDER header: put, then signal(posted); pairs with wait_for_all(posted) at the owner.
template <class Wire>
inline bool exchange_headers(const symmetric_heap &heap, const call_header &header, const routing_view &routing,
                             const wait_context &context, wait_site site) {
    if (!wait_for_previous_call(heap, context.epoch, context, site)) return false;
    const bool fits = !header.refused && routing.topk_ids && routing.num_tokens <= heap.max_tokens;
    const int64_t pairs = fits ? routing.num_tokens * routing.top_k : 0;
    for (int distance = 0; distance < heap.world; ++distance) {
        const int to = (heap.rank + distance) % heap.world;
        if (pairs > 0) {
            Wire::put(heap.topk_ids(to, heap.rank, routing.top_k), routing.topk_ids, pairs * 4);
            Wire::put(heap.topk_weights(to, heap.rank, routing.top_k), routing.topk_weights, pairs * 4);
        }
        Wire::put(heap.header(to, heap.rank), &header, sizeof(header));
        Wire::signal(heap.posted(to, heap.rank), context.epoch);
    }
    site.phase = phase_id::exchange;
    return wait_for_all(heap, heap.offset.posted, context.epoch, context, site);
}

}  // namespace moe_tk::protocol
