// Injected delays: every fault point of the shipped headers becomes a random pause. Compiled in with -include, before all else.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace native {

// xorshift: one state per thread, so that drawing costs no synchronisation that could hide a race.
struct random_state {
    uint64_t word;
    explicit random_state(uint64_t seed) : word(seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull) { next(); next(); }
    uint64_t next() {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        return word;
    }
    int64_t below(int64_t bound) { return int64_t((next() >> 11) % uint64_t(bound)); }
};

inline std::atomic<uint64_t> delay_seed{1};
inline std::atomic<int> delay_level{0};  // one pause in this many points; 0 = none

inline void random_pause() {
    const int level = delay_level.load(std::memory_order_relaxed);
    if (level == 0) return;
    thread_local random_state random(delay_seed.fetch_add(1, std::memory_order_relaxed));
    if (random.below(level) != 0) return;
    const int64_t kind = random.below(8);
    if (kind < 4) { sched_yield(); return; }
    const timespec pause{0, long(kind < 7 ? random.below(50'000) : random.below(1'000'000))};
    nanosleep(&pause, nullptr);
}

}  // namespace native

#define MOE_TK_FAULT_POINT(phase) ::native::random_pause();
