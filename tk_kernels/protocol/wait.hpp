// Bounded waits. A wait ends when the word comes to its value, when its producer is lost, when anybody aborts, or when its
// time runs out; in all cases but the first it returns false and the caller must return too, without touching what it waited for.
#pragma once

#include <cstdint>

#include "../platform/atomics_host.hpp"
#include "control.hpp"
#include "epoch.hpp"

namespace moe_tk::protocol {

using platform::scope;

// One per launch and rank. Blocks share it; only `record_claim` and `progress` are written.
struct wait_context {
    control_block *own = nullptr;
    control_block *peers[MAX_RANKS] = {};
    int world = 1;
    int rank = 0;
    uint32_t epoch = 0;
    uint64_t timeout_ns = 0;  // wall clock, counted from the last sign of progress of the producer
    uint32_t *record_claim = nullptr;    // local: the first block whose time runs out writes the record
    uint32_t *progress = nullptr;        // local: items finished by this rank
    uint64_t *last_forward_ns = nullptr; // local: when progress was last sent to the peers
};

inline bool aborted(const wait_context &context) {
    // Acquire: pairs with the release store in raise_abort, so that records are visible once the flag is.
    return platform::load_acquire<scope::system>(&context.own->abort_flag) != 0;
}

// Bits of the ranks whose processes are gone.
inline uint64_t lost_ranks(const wait_context &context) {
    return platform::load_acquire<scope::system>(&context.own->lost_ranks);
}

inline control_block *control_of(const wait_context &context, int rank) {
    return rank == context.rank ? context.own : context.peers[rank];
}

// Writes this rank's wait record at every rank, once per launch: the first block that gives up speaks for all.
inline bool file_record(const wait_context &context, const wait_record &record) {
    if (platform::exchange_acq_rel<scope::device>(context.record_claim, 1u) != 0) return false;
    for (int to = 0; to < context.world; ++to) control_of(context, to)->records[context.rank] = record;
    return true;
}

// Tells every rank, this one last, so that nobody is left waiting if this process dies half-way.
// ORDER abort: the release stores pair with the acquire load in aborted(); records were written before.
inline void raise_abort(const wait_context &context, abort_kind kind) {
    for (int distance = 1; distance <= context.world; ++distance) {
        const int to = (context.rank + distance) % context.world;
        const abort_kind told = to == context.rank ? kind : abort_kind::told_by_peer;
        platform::store_release<scope::system>(&control_of(context, to)->abort_flag, uint32_t(told));
    }
}

// Called for every finished item; peers hear of it at most every 20 ms (one plain store each, nobody waits on it).
inline void note_progress(const wait_context &context) {
    constexpr uint64_t FORWARD_NS = 20'000'000;
    const uint32_t count = platform::fetch_add_acq_rel<scope::device>(context.progress, 1u) + 1;
    const uint64_t now = platform::now_ns();
    const uint64_t last = platform::load_relaxed<scope::device>(context.last_forward_ns);
    if (now - last < FORWARD_NS && last != 0) return;
    platform::store_relaxed<scope::device>(context.last_forward_ns, now);
    for (int to = 0; to < context.world; ++to) {
        control_block *block = to == context.rank ? context.own : context.peers[to];
        platform::store_relaxed<scope::system>(&block->progress[context.rank], count);
    }
}

// Sleeps longer the longer it waits: blocks are threads here and may outnumber the cores.
class backoff {
  public:
    void pause() {
        if (++spins_ < 64) return;
        const uint32_t nap = spins_ < 256 ? 1'000 : spins_ < 1024 ? 20'000 : 200'000;
        platform::nap_ns(nap);
    }

  private:
    uint32_t spins_ = 0;
};

// Local waits hang on a remote one in the end: they give that one time to speak first, since it names the missing rank.
constexpr uint64_t LOCAL_GRACE_NS = 500'000'000;

// Gives up a wait: files who waited for what, and tells everybody unless it is an abort that ended the wait.
inline void give_up(const wait_context &context, const wait_site &site, uint32_t want, uint32_t seen, uint64_t waited_ns,
                    uint64_t missing, abort_kind kind) {
    wait_record record{.site = site, .expected = want, .seen = seen, .kind = uint32_t(kind), .epoch = context.epoch,
                       .waited_ns = waited_ns, .missing = missing};
    record.site.rank = context.rank;
    const bool first = file_record(context, record);
    if (first && kind != abort_kind::told_by_peer) raise_abort(context, kind);
}

// Waits until *word has come to `want`. `word` must be in this rank's own memory: nobody polls remote memory.
// ORDER: the acquire load pairs with the release of whoever writes the word (the site names the producer).
inline bool spin_until(const uint32_t *word, uint32_t want, const wait_context &context, const wait_site &site) {
    uint32_t seen = platform::load_acquire<scope::system>(word);
    if (reached(seen, want)) return true;
    const bool local = site.producer < 0 || site.producer == context.rank;
    const uint32_t *sign = local ? context.progress : &context.own->progress[site.producer];
    const uint64_t limit_ns = context.timeout_ns + (local ? LOCAL_GRACE_NS : 0);
    const uint64_t begin = platform::now_ns();
    uint64_t alive_since = begin;
    uint32_t last_sign = platform::load_relaxed<scope::system>(sign);
    for (backoff wait;; wait.pause()) {
        seen = platform::load_acquire<scope::system>(word);
        if (reached(seen, want)) return true;
        const uint64_t now = platform::now_ns();
        const uint64_t missing = local ? 0 : 1ull << site.producer;
        const bool lost = (lost_ranks(context) & missing) != 0;
        if (lost || aborted(context)) {
            // The producer may have delivered just before it died, or before the flag: look once more.
            if (reached(platform::load_acquire<scope::system>(word), want)) return true;
            give_up(context, site, want, seen, now - begin, missing, lost ? abort_kind::peer_lost : abort_kind::told_by_peer);
            return false;
        }
        const uint32_t new_sign = platform::load_relaxed<scope::system>(sign);
        if (new_sign != last_sign) { last_sign = new_sign; alive_since = now; }
        if (now - alive_since >= limit_ns) {
            give_up(context, site, want, seen, now - begin, missing, abort_kind::timeout);
            return false;
        }
    }
}

}  // namespace moe_tk::protocol
