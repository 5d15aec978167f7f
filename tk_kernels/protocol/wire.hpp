// How bytes and signals get to another rank. A wire is a policy: the direct one below stores straight into the peer's
// mapped memory; tests put a wire in its place that delays and reorders what the memory model lets it reorder.
#pragma once

#include <cstdint>
#include <cstring>

#include "../platform/atomics_host.hpp"

namespace moe_tk::protocol {

// Single-writer slots only: every `signal` target has one writing rank, and is polled by its owner in local memory.
struct direct_wire {
    static void put(void *to, const void *from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }

    // ORDER data_then_signal: the system-scope release orders every earlier put of this thread (and, through the
    // acq_rel election before it, of the threads it speaks for) before the slot; pairs with spin_until at the owner.
    static void signal(uint32_t *slot, uint32_t epoch) {
        platform::store_release<platform::scope::system>(slot, epoch);
    }
};

}  // namespace moe_tk::protocol
