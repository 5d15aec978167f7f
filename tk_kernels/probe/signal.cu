// Signals between two GPUs: how long one takes, and whether remote atomic increments all arrive while data is moving.
#include <chrono>
#include <thread>
#include <vector>

#include "support.cuh"

namespace moe_tk_probe {
namespace {

struct ping_args {
    uint32_t *mine;   // in this GPU's memory: polled here, written by the other
    uint32_t *theirs; // in the other GPU's memory
    uint32_t rounds, warmup;
    uint32_t first;   // 1: this side begins
    uint64_t limit_ns;
    uint64_t *out;    // [0] elapsed ns of the timed rounds, [1] 1 if a wait ran out
};

// One thread on each side. The side that begins measures.
__global__ void ping_pong(ping_args a) {
    uint64_t began = 0;
    for (uint32_t i = 1; i <= a.rounds + a.warmup; ++i) {
        if (i == a.warmup + 1) began = global_ns();
        if (a.first) store_release_sys(a.theirs, i);
        if (!wait_at_least(a.mine, i, a.limit_ns)) {
            a.out[1] = 1;
            return;
        }
        if (!a.first) store_release_sys(a.theirs, i);
    }
    a.out[0] = global_ns() - began;
}

double one_way_us(int first, int second, uint32_t rounds, double limit_s, bool &timed_out) {
    enable_peer(first, second);
    enable_peer(second, first);
    buffer word_first(first, 256), word_second(second, 256), out_first(first, 16), out_second(second, 16);
    for (buffer *b : {&word_first, &word_second, &out_first, &out_second}) b->fill(0);
    stream stream_first(first), stream_second(second);
    cudaFuncAttributes attributes;
    for (int device : {first, second}) { // load the kernel before anybody spins
        MOE_TK_PROBE_CHECK(cudaSetDevice(device));
        MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, ping_pong));
    }
    const uint64_t limit_ns = uint64_t(limit_s * 1e9);
    const uint32_t warmup = rounds / 10 + 1;
    MOE_TK_PROBE_CHECK(cudaSetDevice(second));
    ping_pong<<<1, 1, 0, stream_second.get()>>>({word_second.as<uint32_t>(), word_first.as<uint32_t>(), rounds, warmup, 0,
                                                 limit_ns, out_second.as<uint64_t>()});
    MOE_TK_PROBE_CHECK(cudaGetLastError());
    MOE_TK_PROBE_CHECK(cudaSetDevice(first));
    ping_pong<<<1, 1, 0, stream_first.get()>>>({word_first.as<uint32_t>(), word_second.as<uint32_t>(), rounds, warmup, 1,
                                                limit_ns, out_first.as<uint64_t>()});
    MOE_TK_PROBE_CHECK(cudaGetLastError());
    stream_first.wait();
    stream_second.wait();
    timed_out = read_back(out_first.as<uint64_t>() + 1) != 0 || read_back(out_second.as<uint64_t>() + 1) != 0;
    return double(read_back(out_first.as<uint64_t>())) / rounds / 2 / 1000;
}

constexpr int WORDS = 64; // counters, 128 bytes apart
constexpr int STRIDE = 32;

struct storm_args {
    uint32_t *counters; // in the target's memory
    uint32_t increments; // per thread
    uint4 *sink;        // in the target's memory: stored to by the other half of the blocks, nullptr for none
    uint64_t sink_words;
    uint32_t passes;
};

// Even blocks increment, odd blocks store into the same GPU's memory at full speed.
__global__ __launch_bounds__(256) void storm(storm_args a) {
    if (blockIdx.x % 2 == 0) {
        uint32_t *counter = a.counters + ((blockIdx.x / 2 * blockDim.x + threadIdx.x) % WORDS) * STRIDE;
        for (uint32_t i = 0; i < a.increments; ++i) red_add_relaxed_sys(counter, 1);
    } else if (a.sink) {
        const uint64_t stride = uint64_t(gridDim.x / 2) * blockDim.x;
        for (uint32_t pass = 0; pass < a.passes; ++pass) {
            for (uint64_t w = (blockIdx.x / 2) * blockDim.x + threadIdx.x; w < a.sink_words; w += stride) {
                a.sink[w] = make_uint4(pass, threadIdx.x, blockIdx.x, 7);
            }
        }
    }
}

} // namespace
} // namespace moe_tk_probe

// Half the round trip of a release store into the other GPU's memory that polls locally, averaged over `rounds`.
MOE_TK_PROBE_API int moe_tk_probe_signal(int first, int second, int rounds, double limit_s, double *us, int *timed_out) {
    using namespace moe_tk_probe;
    return guarded([&] {
        bool late = false;
        *us = one_way_us(first, second, static_cast<uint32_t>(rounds), limit_s, late);
        *timed_out = late;
    });
}

// `sources` (count of them; HOST memory when target is -1; the target itself may be one) all increment counters of the
// target while they store to it. sent and counted must be equal.
MOE_TK_PROBE_API int moe_tk_probe_atomics(int target, const int *sources, int count, int increments, uint64_t *sent,
                                          uint64_t *counted) {
    using namespace moe_tk_probe;
    return guarded([&] {
        constexpr int BLOCKS = 16, THREADS = 256;
        constexpr size_t SINK = 8 << 20;
        buffer counters(target, WORDS * STRIDE * sizeof(uint32_t));
        counters.fill(0);
        std::vector<buffer> sinks;
        std::vector<stream> streams;
        cudaFuncAttributes attributes;
        for (int i = 0; i < count; ++i) {
            enable_peer(sources[i], target);
            sinks.emplace_back(target, SINK);
            streams.emplace_back(sources[i]);
            MOE_TK_PROBE_CHECK(cudaSetDevice(sources[i]));
            MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, storm));
        }
        for (int i = 0; i < count; ++i) {
            MOE_TK_PROBE_CHECK(cudaSetDevice(sources[i]));
            storm<<<BLOCKS, THREADS, 0, streams[i].get()>>>({counters.as<uint32_t>(), uint32_t(increments),
                                                             sinks[i].as<uint4>(), SINK / 16, 8});
            MOE_TK_PROBE_CHECK(cudaGetLastError());
        }
        for (auto &s : streams) s.wait();
        std::vector<uint32_t> words(WORDS * STRIDE);
        MOE_TK_PROBE_CHECK(cudaMemcpy(words.data(), counters.as(), words.size() * 4, cudaMemcpyDefault));
        *counted = 0;
        for (int w = 0; w < WORDS; ++w) *counted += words[w * STRIDE];
        *sent = uint64_t(count) * (BLOCKS / 2) * THREADS * increments;
    });
}
