// How bytes and signals get to another rank. A wire is a policy; a link is what it stands on: the peer's memory is mapped,
// so both are stores. Tests put a link in its place that delays, reorders and loses what real ones may.
//
// | wire   | signals                          | remote read-modify-write | remote loads    |
// | shm    | single-writer slots              | none                     | pull reads rows |
// | pcie   | single-writer slots, fence first | none                     | none            |
// | nvlink | slots, and counters              | red.release.sys          | pull reads rows |
//
// Every slot has one writing rank; every word that is waited on lies in the memory of the rank that waits.
#pragma once

#include <cstdint>

#include "../platform/platform.hpp"

namespace moe_tk::protocol {

using platform::scope;

struct mapped_link {
    MOE_TK_FN static void copy(void *to, const void *from, int64_t bytes, int lane, int lanes) {
        platform::copy_bytes(to, from, bytes, lane, lanes);
    }
    MOE_TK_FN static void fence() { platform::fence<scope::system>(); }
    MOE_TK_FN static void store_release(uint32_t *slot, uint32_t value) { platform::store_release<scope::system>(slot, value); }
    MOE_TK_FN static void add_release(uint32_t *counter, uint32_t count) { platform::red_release<scope::system>(counter, count); }
};

// ORDER data_then_signal, in all wires: the system-scope release orders every earlier put of this thread, and through the
// acq_rel election (or block barrier) before it those of the threads it speaks for, before the slot; pairs with spin_until.
template <class Link>
struct slot_wire {
    static constexpr bool COUNTS = false, REMOTE_LOADS = true;
    // Called by `lanes` threads together, lane = 0..lanes-1: each moves its share.
    MOE_TK_FN static void put(void *to, const void *from, int64_t bytes, int lane = 0, int lanes = 1) {
        Link::copy(to, from, bytes, lane, lanes);
    }
    MOE_TK_FN static void signal(uint32_t *slot, uint32_t epoch) { Link::store_release(slot, epoch); }
};

// Over PCIe remote atomics lose increments and remote loads may stay stale: neither is used. The explicit fence orders the
// puts even where a release store alone reaches the peer by another way than they do.
template <class Link>
struct fenced_wire : slot_wire<Link> {
    static constexpr bool REMOTE_LOADS = false;
    MOE_TK_FN static void signal(uint32_t *slot, uint32_t epoch) {
        Link::fence();
        Link::store_release(slot, epoch);
    }
};

// Over NVLink remote reductions arrive, so each writer may count itself at the receiver: no election, one hop less.
template <class Link>
struct counter_wire : slot_wire<Link> {
    static constexpr bool COUNTS = true;
    MOE_TK_FN static void count(uint32_t *counter, uint32_t count) { Link::add_release(counter, count); }
};

using shm_wire = slot_wire<mapped_link>;
using pcie_wire = fenced_wire<mapped_link>;
using nvlink_wire = counter_wire<mapped_link>;

}  // namespace moe_tk::protocol
