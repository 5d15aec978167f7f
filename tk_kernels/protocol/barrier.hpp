// The rank barrier, split in two: a rank arrives when its call is over and waits only when it is about to write into its
// peers' memory again. So the wait costs nothing unless somebody really is a call behind.
#pragma once

#include <cstdint>

#include "../platform/fault_points.hpp"
#include "heap.hpp"
#include "wait.hpp"

namespace moe_tk::protocol {

// ORDER call_over: releases to wait_for_previous_call at every peer; all reads of this call come before it.
template <class Wire>
MOE_TK_FN void arrive(const symmetric_heap &heap, uint32_t epoch) {
    for (int distance = 0; distance < heap.world; ++distance) {
        MOE_TK_FAULT_POINT(phase_id::barrier)
        Wire::signal(heap.done((heap.rank + distance) % heap.world, heap.rank), epoch);
    }
}

// Ranks whose flag of one flag row has not come to `epoch`.
MOE_TK_FN uint64_t not_yet(const uint32_t *flags, int world, uint32_t epoch) {
    uint64_t missing = 0;
    for (int p = 0; p < world; ++p) {
        if (!reached(platform::load_acquire<scope::system>(flags + p * FLAG_LINE), epoch)) missing |= 1ull << p;
    }
    return missing;
}

// Moves whenever any rank finishes an item of an earlier call, and when one is missing no more.
MOE_TK_FN uint32_t sign_of(const wait_context &context, uint64_t missing) {
    uint32_t sum = signs_of_life(context);
    for (; missing; missing &= missing - 1) --sum;  // less: adding would cancel the progress of a rank that finishes and comes
    return sum;
}

// Waits for all ranks' flags of one row; on failure the record names every rank that has not come, not only the first.
MOE_TK_FN bool wait_for_all(const symmetric_heap &heap, int64_t flag_offset, uint32_t epoch, const wait_context &context,
                            wait_site site) {
    const uint32_t *flags = heap.region<const uint32_t>(heap.rank, flag_offset);
    patience clock(0);
    for (uint32_t looks = 1;; platform::nap_before_look(++looks)) {
        const uint64_t seen_missing = not_yet(flags, heap.world, epoch);
        if (seen_missing == 0) return true;
        const bool over = clock.over(sign_of(context, seen_missing), context.timeout_ns);
        const abort_kind kind = why_stop(context, seen_missing, over);
        if (kind == abort_kind::none) continue;
        platform::fence<scope::system>();  // as in spin_until: the flags have the last say
        const uint64_t missing = not_yet(flags, heap.world, epoch);
        if (missing == 0) return true;
        if (missing != seen_missing && kind != abort_kind::told_by_peer) continue;  // somebody came meanwhile: judge again
        const uint64_t lost = missing & lost_ranks(context);
        site.producer = platform::lowest_bit(lost ? lost : missing);
        const uint32_t seen = platform::load_relaxed<scope::system>(flags + site.producer * FLAG_LINE);
        give_up(context, site, epoch, seen, clock.waited_ns(), missing, kind);
        return false;
    }
}

// ORDER call_over: acquires what arrive() released. Before it nothing may be written into a peer's heap.
MOE_TK_FN bool wait_for_previous_call(const symmetric_heap &heap, uint32_t epoch, const wait_context &context, wait_site site) {
    site.phase = phase_id::barrier;
    return wait_for_all(heap, heap.offset.done, epoch - 1, context, site);
}

}  // namespace moe_tk::protocol
