// The rank barrier, split in two: a rank arrives when its call is over and waits only when it is about to write into its
// peers' memory again. So the wait costs nothing unless somebody really is a call behind.
#pragma once

#include <cstdint>

#include "heap.hpp"
#include "wait.hpp"

namespace moe_tk::protocol {

// ORDER call_over: releases to wait_for_previous_call at every peer; all reads of this call come before it.
template <class Wire>
inline void arrive(const symmetric_heap &heap, uint32_t epoch) {
    for (int distance = 0; distance < heap.world; ++distance) {
        Wire::signal(heap.done((heap.rank + distance) % heap.world, heap.rank), epoch);
    }
}

// Ranks whose flag of one flag row has not come to `epoch`.
inline uint64_t not_yet(const uint32_t *flags, int world, uint32_t epoch) {
    uint64_t missing = 0;
    for (int p = 0; p < world; ++p) {
        if (!reached(platform::load_acquire<scope::system>(flags + p * FLAG_LINE), epoch)) missing |= 1ull << p;
    }
    return missing;
}

// Waits for all ranks' flags of one row; on failure the record names every rank that has not come, not only the first.
inline bool wait_for_all(const symmetric_heap &heap, int64_t flag_offset, uint32_t epoch, const wait_context &context,
                         wait_site site) {
    const uint32_t *flags = heap.region<const uint32_t>(heap.rank, flag_offset);
    const uint64_t begin = platform::now_ns();
    for (backoff wait;; wait.pause()) {
        const uint64_t lost = lost_ranks(context);
        const bool told = aborted(context);
        const uint64_t waited = platform::now_ns() - begin;
        const uint64_t missing = not_yet(flags, heap.world, epoch);  // last: a flag may have come before its writer died
        if (missing == 0) return true;
        abort_kind kind = abort_kind::none;
        if (missing & lost) kind = abort_kind::peer_lost;
        else if (told) kind = abort_kind::told_by_peer;
        else if (waited >= context.timeout_ns) kind = abort_kind::timeout;
        if (kind == abort_kind::none) continue;
        site.producer = __builtin_ctzll(missing & lost ? missing & lost : missing);
        give_up(context, site, epoch, flags[site.producer * FLAG_LINE], waited, missing, kind);
        return false;
    }
}

// ORDER call_over: acquires what arrive() released. Before it nothing may be written into a peer's heap.
inline bool wait_for_previous_call(const symmetric_heap &heap, uint32_t epoch, const wait_context &context, wait_site site) {
    site.phase = phase_id::barrier;
    return wait_for_all(heap, heap.offset.done, epoch - 1, context, site);
}

}  // namespace moe_tk::protocol
