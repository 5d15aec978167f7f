// Row-block counters: rows that have been placed, tiles that have been computed. Any block of this rank counts, any block
// waits; they count over all epochs, and `want` is moved on by the launch before its blocks start.
#pragma once

#include <cstdint>

#include "wait.hpp"

namespace moe_tk::protocol {

// Counts what this thread has written into the row block (and, after a block barrier, what its whole block has).
// ORDER rows_ready: releases to wait_ready. The proxy fence is the writer's half: rows stored by ordinary stores are read by TMA.
MOE_TK_FN void count_ready(uint32_t *counter, uint32_t count) {
    platform::fence_proxy_async();
    platform::fetch_add_acq_rel<scope::device>(counter, count);
}

// ORDER rows_ready: acquires what count_ready releases; the proxy fence carries it on to TMA loads of this thread.
MOE_TK_FN bool wait_ready(const uint32_t *counter, uint32_t want, const wait_context &context, const wait_site &site) {
    if (!spin_until<scope::device>(counter, want, context, site)) return false;
    platform::fence_proxy_async();
    return true;
}

}  // namespace moe_tk::protocol
