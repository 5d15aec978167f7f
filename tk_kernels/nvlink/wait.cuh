// Bounded waits on the device. A wait ends when the word comes to its value, when its producer is lost, when anybody
// aborts, or when its time runs out; in all cases but the first it returns false. After that no wait of this rank lasts,
// so the kernels run to their ends on whatever data there is and the context survives; the host discards the result.
#pragma once

#include "../protocol/epoch.hpp"
#include "call.cuh"
#include "device_ops.cuh"

namespace moe_tk::nvlink {

using protocol::abort_kind;
using protocol::phase_id;
using protocol::role_id;

struct wait_place {
    phase_id phase;
    role_id role;
    int slot;      // row block, chunk, ..: the index that is waited on
    int producer;  // rank that would end the wait; the own one for local waits
};

constexpr uint32_t TOLD_ALL = 1u << 31;  // of record_claim: the abort flags of all ranks are up
constexpr uint64_t TELL_LIMIT_NS = 1'000'000'000;  // for what takes microseconds: no wait is without an end

// Files this rank's record at every rank, once, and tells everybody. Returns when that has been done, by whichever thread: what the
// kernel goes on with may be wrong from here on, and whatever says that it is there must come after the flags.
// Inlined: a call anywhere in a kernel makes the compiler serialise its wgmma.
__device__ __forceinline__ void give_up(const call_view &c, wait_place place, uint32_t want, uint32_t seen, uint64_t waited_ns,
                                     abort_kind kind) {
    if (fetch_add_acq_rel_gpu(c.record_claim, 1u) != 0) {
        const uint64_t begin = now_ns();  // the one that was first waits for nobody
        while (!(load_acquire_sys(c.record_claim) & TOLD_ALL) && now_ns() - begin < TELL_LIMIT_NS) nap_ns(100);
        return;
    }
    protocol::wait_record record{};
    record.site = {protocol::op_id::moe_layer, place.phase, place.role, c.rank, int32_t(blockIdx.x), place.slot, place.producer};
    record.expected = want, record.seen = seen, record.kind = uint32_t(kind), record.epoch = *c.epoch_ptr;
    record.waited_ns = waited_ns;
    record.missing = place.producer == c.rank ? 0 : 1ull << place.producer;
    for (int to = 0; to < c.world; ++to) c.control(to)->records[c.rank] = record;
    fence_sys();
    for (int distance = 1; distance <= c.world; ++distance) {  // also what it was told: whoever told it may have died half-way
        const int to = (c.rank + distance) % c.world;
        store_release_sys(&c.control(to)->abort_flag, uint32_t(to == c.rank ? kind : abort_kind::told_by_peer));
    }
    store_release_sys(&c.host->failed, uint32_t(kind));
    fetch_add_acq_rel_gpu(c.record_claim, TOLD_ALL);
}

// Whoever hands out no result tells its host so, also where none of this rank's waits was given up: others may have told it
// when nothing was left to wait for.
__device__ __forceinline__ void report_told(const call_view &c) {
    store_release_sys(&c.host->failed, uint32_t(abort_kind::told_by_peer));  // records say more
}

// Local waits hang on a remote one in the end: they leave that one the time to speak first, since it names the rank.
constexpr uint64_t LOCAL_GRACE_NS = 500'000'000;

// Looks between two at the words in host memory: some milliseconds. Thousands of threads wait at a time and each look is a
// read over PCIe, so no wait of a call that goes well should come so far.
constexpr uint32_t HOST_SPINS = 4096;

__device__ __forceinline__ bool spin_slowly(const uint32_t *word, uint32_t want, const call_view &c, wait_place place) {
    const uint64_t begin = now_ns();
    const bool local = place.producer == c.rank;
    const uint64_t limit = c.timeout_ns + (local ? LOCAL_GRACE_NS : 0);
    for (uint32_t spins = 1;; ++spins) {
        const uint32_t seen = load_acquire_sys(word);
        if (protocol::reached(seen, want)) return true;
        if (spins > 16) nap_ns(spins < 256 ? 50 : 300);
        if (spins % 32) continue;
        abort_kind kind = abort_kind::none;
        if (load_relaxed_sys(&c.control(c.rank)->abort_flag)) kind = abort_kind::told_by_peer;
        else if (spins % HOST_SPINS == 0 && load_relaxed_sys(&c.host->host_abort)) kind = abort_kind::host;
        else if (spins % HOST_SPINS == 0 && !local && (load_relaxed_sys(&c.host->lost_ranks) >> place.producer & 1)) kind = abort_kind::peer_lost;
        else if (now_ns() - begin >= limit) kind = abort_kind::timeout;
        if (kind == abort_kind::none) continue;
        if (protocol::reached(load_acquire_sys(word), want)) return true;  // it may have come just before
        give_up(c, place, want, seen, now_ns() - begin, kind);
        return false;
    }
}

// Waits until *word has come to `want`. `word` is in this GPU's memory: nobody polls remote memory.
__device__ __forceinline__ bool spin_until(const uint32_t *word, uint32_t want, const call_view &c, wait_place place) {
    return protocol::reached(load_acquire_sys(word), want) || spin_slowly(word, want, c, place);
}

}  // namespace moe_tk::nvlink
