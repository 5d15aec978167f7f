// What the write-and-read-back probe writes, expects and does wrong on purpose: plain C++, so that it is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define MOE_TK_PROBE_ANYWHERE __host__ __device__
#else
#define MOE_TK_PROBE_ANYWHERE
#endif

namespace moe_tk_probe {

enum fault : int { NO_FAULT = 0, WRONG_WORD = 1, NO_FLAG = 2 }; // mistakes on purpose: tests see the check fail

struct alignas(16) word16 { // moved by one 16-byte access
    uint64_t x, y;
};

struct finding {
    unsigned long long first_bad; // byte offset, ~0 when all is right
    unsigned long long bad;       // 16-byte words that differ
    uint32_t timed_out;
    uint32_t padding;
};

struct verify_args {
    word16 *source;     // push: in the mover's memory; pull: in the keeper's
    word16 *target;     // push: in the keeper's memory; pull: in the mover's
    uint64_t words;     // of 16 bytes
    uint64_t seed;
    uint32_t *arrivals; // election counter, in the publisher's own memory
    uint32_t *flag;     // in the waiter's memory
    uint32_t epoch;
    uint64_t limit_ns;
    finding *out;       // in the checker's memory
    int bulk;
    int fault;
};

struct verify_request {
    int mover, keeper;
    bool push, bulk;
    size_t bytes;
    double limit_s;
    int fault;
};

struct verify_memory {
    word16 *source, *target;
    uint32_t *arrivals, *flag;
    finding *out;
};

inline uint64_t seed_of(int round) { return 0x5eed0000ull + uint64_t(round) * 7919; }

// Every field is named: a list that is one short would leave the last one zero, silently.
inline verify_args args_of(const verify_request &request, const verify_memory &memory, int round) {
    return {.source = memory.source,
            .target = memory.target,
            .words = request.bytes / sizeof(word16),
            .seed = seed_of(round),
            .arrivals = memory.arrivals,
            .flag = memory.flag,
            .epoch = uint32_t(round + 1),
            .limit_ns = uint64_t(request.limit_s * 1e9),
            .out = memory.out,
            .bulk = request.bulk,
            .fault = request.fault};
}

MOE_TK_PROBE_ANYWHERE inline uint64_t mixed(uint64_t x) { // splitmix64
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// What word number `word` must be.
MOE_TK_PROBE_ANYWHERE inline word16 pattern(uint64_t word, uint64_t seed) {
    return {mixed(word * 2 + seed), mixed(word * 2 + 1 + seed)};
}

// What is written there: the same, but for a mistake on purpose in the middle.
MOE_TK_PROBE_ANYWHERE inline word16 written(const verify_args &a, uint64_t word) {
    word16 v = pattern(word, a.seed);
    if (a.fault == WRONG_WORD && word == a.words / 2) v.x ^= 1;
    return v;
}

// The last of `blocks` to arrive sends the flag; `before`: how many had arrived before it, over all rounds.
MOE_TK_PROBE_ANYWHERE inline bool sends_flag(const verify_args &a, uint32_t before, uint32_t blocks) {
    return (before + 1) % blocks == 0 && a.fault != NO_FLAG;
}

} // namespace moe_tk_probe
