// Memory-order primitives of the device, one wrapper each, and the clock. Words are in global memory: this GPU's, a peer's
// or pinned host memory.
#pragma once

#include <cstdint>

namespace moe_tk::nvlink {

__device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_relaxed_sys(const uint32_t *word) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}
__device__ __forceinline__ void store_release_sys(uint32_t *word, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_sys(uint32_t *word, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void add_release_gpu(uint32_t *word, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t fetch_add_acq_rel_gpu(uint32_t *word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}
__device__ __forceinline__ uint32_t fetch_add_relaxed_gpu(uint32_t *word, uint32_t value) {
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
    return old;
}
// Counts 0, 1, .. most, 0, 1, ..: a counter of `most` + 1 arrivals that resets itself. Returns the old value.
__device__ __forceinline__ uint32_t fetch_inc_wrap_acq_rel_gpu(uint32_t *word, uint32_t most) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(most) : "memory");
    return old;
}
__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// The two halves of a barrier of the cluster; whole warps.
__device__ __forceinline__ void cluster_arrive_release() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait_acquire() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Wall clock (ns), monotonic on one GPU.
__device__ __forceinline__ uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
__device__ __forceinline__ void nap_ns(uint32_t duration) { asm volatile("nanosleep.u32 %0;" ::"r"(duration) : "memory"); }

}  // namespace moe_tk::nvlink
