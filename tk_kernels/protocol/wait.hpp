// Bounded waits. A wait ends when the word comes to its value, when its producer is lost, when anybody aborts, or when its
// time runs out; in all cases but the first it returns false and the caller must return too, without touching what it waited for.
#pragma once

#include <cstdint>

#include "abort.hpp"

namespace moe_tk::protocol {

// Local waits hang on a remote one in the end: they give that one time to speak first, since it names the missing rank.
constexpr uint64_t LOCAL_GRACE_NS = 500'000'000;

// For how long no rank has shown a sign of life: time runs from the last change of `sign`. Time in which this thread did not
// run (a stopped process, a paused machine) hardly counts: who was frozen has to look again before it may blame others. But
// every look counts up to FROZEN_NS, so that a wait ends on a machine where threads hardly ever run, too.
struct patience {
    static constexpr uint64_t FROZEN_NS = 250'000'000;  // far above what a busy machine keeps a thread waiting
    uint64_t begin_ns, alive_ns, looked_ns;
    uint32_t last_sign;

    MOE_TK_FN explicit patience(uint32_t sign)
        : begin_ns(platform::now_ns()), alive_ns(begin_ns), looked_ns(begin_ns), last_sign(sign) {}

    MOE_TK_FN bool over(uint32_t sign, uint64_t limit_ns) {
        const uint64_t now = look();
        if (sign != last_sign) { last_sign = sign; alive_ns = now; }
        return now - alive_ns >= limit_ns;
    }
    MOE_TK_FN uint64_t waited_ns() { return look() - begin_ns; }

    // The time of this look; what it comes too late for is taken off both clocks.
    MOE_TK_FN uint64_t look() {
        const uint64_t now = platform::now_ns(), gap = now - looked_ns;
        if (gap > FROZEN_NS) { begin_ns += gap - FROZEN_NS; alive_ns += gap - FROZEN_NS; }
        return looked_ns = now;
    }
};

MOE_TK_FN abort_kind why_stop(const wait_context &context, uint64_t missing, bool over) {
    if (lost_ranks(context) & missing) return abort_kind::peer_lost;
    if (aborted(context)) return abort_kind::told_by_peer;
    return over ? abort_kind::timeout : abort_kind::none;
}

// Waits until *word has come to `want`. `word` must be in this rank's own memory: nobody polls remote memory. S is how far
// away its writers are.
// ORDER: the acquire load pairs with the release of whoever writes the word (the site names the producer).
template <scope S = scope::system>
MOE_TK_FN bool spin_until(const uint32_t *word, uint32_t want, const wait_context &context, const wait_site &site) {
    if (reached(platform::load_acquire<S>(word), want)) return true;
    const bool local = site.producer < 0 || site.producer == context.rank;
    const uint64_t missing = local ? 0 : 1ull << site.producer;
    const uint64_t limit_ns = context.timeout_ns + (local ? LOCAL_GRACE_NS : 0);
    patience clock(signs_of_life(context));
    for (uint32_t looks = 1;; platform::nap_before_look(++looks)) {
        if (reached(platform::load_acquire<S>(word), want)) return true;
        const bool over = looks % 8 == 0 && clock.over(signs_of_life(context), limit_ns);
        const abort_kind kind = why_stop(context, missing, over);
        if (kind == abort_kind::none) continue;
        // The producer may have delivered just before it died, before the flag, or while this thread was stopped: the word
        // has the last say, and is read after what speaks against it.
        platform::fence<scope::system>();
        const uint32_t seen = platform::load_acquire<S>(word);
        if (reached(seen, want)) return true;
        give_up(context, site, want, seen, clock.waited_ns(), missing, kind);
        return false;
    }
}

}  // namespace moe_tk::protocol
