// What every wait of a launch looks at: whose call it is, how long it may take, who is gone and whether anybody gave up.
#pragma once

#include <cstdint>

#include "control.hpp"
#include "epoch.hpp"

namespace moe_tk::protocol {

using platform::scope;

// One per rank; blocks share it. It can be frozen into launch arguments: whatever changes is behind a pointer.
struct wait_context {
    control_block *own = nullptr;
    control_block *peers[MAX_RANKS] = {};
    int world = 1;
    int rank = 0;
    uint64_t timeout_ns = 0;             // wall clock, counted from the last sign of life of any rank
    uint32_t *epoch_word = nullptr;      // local: number of the call; moved on by exchange_headers only
    uint32_t *record_claim = nullptr;    // local: the first block whose time runs out writes the record
    uint32_t *progress = nullptr;        // local: items finished by this rank
    uint64_t *last_forward_ns = nullptr; // local: when progress was last sent to the peers
    wait_record *block_records = nullptr;  // local, [num_blocks]: what each block waited for when it gave up; may be null
    int num_blocks = 0;
};

MOE_TK_FN uint32_t call_epoch(const wait_context &context) { return platform::load_relaxed<scope::device>(context.epoch_word); }

// True once anybody gave up. Relaxed: nothing is read on its strength, records carry their own release.
MOE_TK_FN bool aborted(const wait_context &context) {
    return platform::load_relaxed<scope::system>(&context.own->abort_flag) != 0;
}

// Bits of the ranks whose processes are gone.
MOE_TK_FN uint64_t lost_ranks(const wait_context &context) {
    return platform::load_relaxed<scope::system>(&context.own->lost_ranks);
}

MOE_TK_FN control_block *control_of(const wait_context &context, int rank) {
    return rank == context.rank ? context.own : context.peers[rank];
}

// Called for every finished item; peers hear of it at most every 20 ms (one plain store each, nobody waits on it).
MOE_TK_FN void note_progress(const wait_context &context) {
    constexpr uint64_t FORWARD_NS = 20'000'000;
    const uint32_t count = platform::fetch_add_acq_rel<scope::device>(context.progress, 1u) + 1;
    const uint64_t now = platform::now_ns();
    const uint64_t last = platform::load_relaxed<scope::device>(context.last_forward_ns);
    if (now - last < FORWARD_NS && last != 0) return;
    platform::store_relaxed<scope::device>(context.last_forward_ns, now);
    for (int to = 0; to < context.world; ++to) {
        platform::store_relaxed<scope::system>(&control_of(context, to)->progress[context.rank], count);
    }
}

// Moves whenever any rank finishes an item. Not the producer alone counts: it may itself wait for a rank that is at work.
MOE_TK_FN uint32_t signs_of_life(const wait_context &context) {
    uint32_t sum = platform::load_relaxed<scope::device>(context.progress);
    for (int p = 0; p < context.world; ++p) {
        if (p != context.rank) sum += platform::load_relaxed<scope::system>(&context.own->progress[p]);
    }
    return sum;
}

}  // namespace moe_tk::protocol
