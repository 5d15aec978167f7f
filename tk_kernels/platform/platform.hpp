// Memory-order primitives, one set of names for CPU and GPU. Every function takes the scope within which its order holds;
// atomics_device.cuh says it in PTX, atomics_host.hpp in C++ atomics. Code that runs on both is marked MOE_TK_FN and looks
// at MOE_TK_DEVICE, which is 1 only while a compiler makes GPU code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define MOE_TK_FN __host__ __device__ __forceinline__
#else
#define MOE_TK_FN inline
#endif

#if defined(__CUDA_ARCH__)
#define MOE_TK_DEVICE 1
#else
#define MOE_TK_DEVICE 0
#endif

namespace moe_tk::platform {

enum class scope { block, device, system };  // threads of one block, of one GPU, of all GPUs and the host

}  // namespace moe_tk::platform

#include "atomics_host.hpp"
#if defined(__CUDACC__)
#include "atomics_device.cuh"
#endif

#if MOE_TK_DEVICE
#define MOE_TK_SIDE device_side
#else
#define MOE_TK_SIDE host_side
#endif

namespace moe_tk::platform {

// T is uint32_t or uint64_t.
template <scope S, class T>
MOE_TK_FN T load_acquire(const T *word) { return MOE_TK_SIDE::load_acquire<S>(word); }

template <scope S, class T>
MOE_TK_FN T load_relaxed(const T *word) { return MOE_TK_SIDE::load_relaxed<S>(word); }

template <scope S, class T>
MOE_TK_FN void store_release(T *word, T value) { MOE_TK_SIDE::store_release<S>(word, value); }

template <scope S, class T>
MOE_TK_FN void store_relaxed(T *word, T value) { MOE_TK_SIDE::store_relaxed<S>(word, value); }

// Both return the value before.
template <scope S, class T>
MOE_TK_FN T fetch_add_acq_rel(T *word, T value) { return MOE_TK_SIDE::fetch_add_acq_rel<S>(word, value); }

template <scope S, class T>
MOE_TK_FN T exchange_acq_rel(T *word, T value) { return MOE_TK_SIDE::exchange_acq_rel<S>(word, value); }

// Adds and forgets: a reduction, the only read-modify-write that may go to another GPU, and over NVLink only.
template <scope S, class T>
MOE_TK_FN void red_release(T *word, T value) { MOE_TK_SIDE::red_release<S>(word, value); }

// Orders everything before it, and all that this thread has seen of others, before everything after it.
template <scope S>
MOE_TK_FN void fence() { MOE_TK_SIDE::fence<S>(); }

// Between generic accesses and those of the async proxy (TMA), both ways. Nothing on the host and where there is no TMA.
MOE_TK_FN void fence_proxy_async() { MOE_TK_SIDE::fence_proxy_async(); }

MOE_TK_FN void nap_ns(uint32_t duration_ns) { MOE_TK_SIDE::nap_ns(duration_ns); }

// Wall clock that does not jump (ns): host and device each have their own, so compare only readings of one side.
MOE_TK_FN uint64_t now_ns() { return MOE_TK_SIDE::now_ns(); }

// Copies this thread's share of `bytes`, as one of `lanes` threads that call it together with lane = 0..lanes-1.
MOE_TK_FN void copy_bytes(void *to, const void *from, int64_t bytes, int lane, int lanes) {
    MOE_TK_SIDE::copy_bytes(to, from, bytes, lane, lanes);
}

// How long the n-th look at a word that has not changed sleeps: longer the longer it waits. On the host blocks are threads
// and may outnumber the cores; on the device a nap only takes pressure off the memory system.
MOE_TK_FN void nap_before_look(uint32_t looks) {
    if (looks < 64) return;
    if constexpr (MOE_TK_DEVICE) nap_ns(looks < 1024 ? 32 : 256);
    else nap_ns(looks < 256 ? 1'000 : looks < 1024 ? 20'000 : 200'000);
}

// Index of the lowest set bit of a word that is not 0.
MOE_TK_FN int lowest_bit(uint64_t bits) {
#if MOE_TK_DEVICE
    return __ffsll(static_cast<long long>(bits)) - 1;
#else
    return __builtin_ctzll(bits);
#endif
}

}  // namespace moe_tk::platform

#undef MOE_TK_SIDE
