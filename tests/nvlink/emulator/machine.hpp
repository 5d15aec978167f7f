// A GPU's threads on one host thread: each CUDA thread is a fiber, a warp or block operation is a meeting of fibers. Enough to run
// tk_kernels/nvlink as it is, apart from what multiplies. What it shows: indices, counts, who waits for whom. What it cannot
// show: the order of memory, since a store is seen by everybody at once. Asynchronous copies happen as late as they may.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __cluster_dims__
#define __cluster_dims__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__
#define __shared__
#undef __align__
#define __align__(n) __attribute__((aligned(n)))
#undef __forceinline__
#define __forceinline__ inline

using std::max;
using std::min;

namespace emulator {

struct fiber;
struct meeting {  // of `need` fibers
    int need = 0, come = 0;
    std::vector<fiber *> waiting;
    bool votes[3] = {true, true, true};  // of this vote, the next and the one before
};
struct shared_block {  // threads of it that have begun, and that have ended
    char *memory = nullptr;
    int begun = 0, ended = 0;
};
struct cluster : meeting { std::vector<shared_block> blocks; };
struct warp {
    meeting all{32};
    uint32_t behind = 0;     // turns of its fibers that it lets pass
    uint32_t round = 0;
    uint64_t values[2][32];  // of this round and the one before
};
struct bulk_store { void *to; const void *from; uint32_t bytes; };

struct fiber {
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    std::function<void()> body;
    uint3 thread{}, block{};
    dim3 threads, blocks;
    int lane = 0;
    warp *of_warp = nullptr;
    meeting *of_block = nullptr;
    cluster *of_cluster = nullptr;
    std::vector<std::vector<bulk_store>> store_groups{1};  // the last one is open
    uint32_t voted = 0;
    bool done = false;
};

extern fiber *current;
extern uint64_t now, idle;  // a tick for each nap; naps since anything happened

void yield();            // behind all other fibers that can run
void linger();           // at times until nobody else gets any further without this fiber
void meet(meeting &);    // returns when all have come
void something_happened();
[[noreturn]] void fail(const char *what);

template <class T> uint64_t pack(T value) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T> T unpack(uint64_t bits) {
    T value;
    std::memcpy(static_cast<void *>(&value), &bits, sizeof(T));
    return value;
}
// What every lane of the warp has brought.
template <class T> const uint64_t *exchange(T value) {
    warp &w = *current->of_warp;
    uint64_t *values = w.values[w.round & 1];
    values[current->lane] = pack(value);
    if (w.all.come + 1 == w.all.need) ++w.round;
    meet(w.all);
    return values;
}

// Completes all but the newest `left` groups of bulk stores of this thread.
void complete_stores(size_t left);

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define blockDim (emulator::current->threads)
#define gridDim (emulator::current->blocks)

template <class T> T __shfl_sync(unsigned, T v, int from) { return emulator::unpack<T>(emulator::exchange(v)[from & 31]); }
template <class T> T __shfl_up_sync(unsigned, T v, int d) {
    const uint64_t *all = emulator::exchange(v);
    const int lane = emulator::current->lane;
    return emulator::unpack<T>(all[lane < d ? lane : lane - d]);
}
template <class T> T __shfl_down_sync(unsigned, T v, int d) {
    const uint64_t *all = emulator::exchange(v);
    const int lane = emulator::current->lane;
    return emulator::unpack<T>(all[lane + d < 32 ? lane + d : lane]);
}
template <class T> T __shfl_xor_sync(unsigned, T v, int d) {
    return emulator::unpack<T>(emulator::exchange(v)[emulator::current->lane ^ d]);
}
inline uint32_t __ballot_sync(unsigned, int predicate) {
    const uint64_t *all = emulator::exchange(predicate != 0);
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(emulator::unpack<bool>(all[lane])) << lane;
    return bits;
}
inline int __all_sync(unsigned, int predicate) { return __ballot_sync(0, predicate) == ~0u; }
inline uint32_t __reduce_or_sync(unsigned, uint32_t v) {
    const uint64_t *all = emulator::exchange(v);
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= emulator::unpack<uint32_t>(all[lane]);
    return bits;
}
inline uint32_t __match_any_sync(unsigned, int v) {
    const uint64_t *all = emulator::exchange(v);
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(emulator::unpack<int>(all[lane]) == v) << lane;
    return bits;
}
inline void __syncwarp() { emulator::exchange(0); }
inline void __syncthreads() { emulator::meet(*emulator::current->of_block); }
inline int __syncthreads_and(int predicate) {
    emulator::meeting &block = *emulator::current->of_block;
    const uint32_t vote = emulator::current->voted++ % 3;
    block.votes[vote] &= predicate != 0;
    block.votes[(vote + 1) % 3] = true;  // all have read it when they come to this vote
    __syncthreads();
    return block.votes[vote];
}

inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T atomicAdd(T *p, T v) {
    const T old = *p;
    *p += v;
    return old;
}
inline float __int_as_float(int v) { return emulator::unpack<float>(emulator::pack(v)); }
inline int __float_as_int(float v) { return emulator::unpack<int>(emulator::pack(v)); }
inline float __uint_as_float(uint32_t v) { return emulator::unpack<float>(emulator::pack(v)); }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __powf(float base, float exponent) { return powf(base, exponent); }
