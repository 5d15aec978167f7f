// Semaphores (mbarrier), named barriers, fences, clusters and register re-allocation. Every wrapper clobbers "memory".
#pragma once

#include "../common/base.cuh"

namespace kittens {

// ---- semaphores: an mbarrier. Phase bit 0 is the first phase; wait(sem, phase) returns once that phase has completed.
struct alignas(8) semaphore {
    uint64_t state;
};

__device__ __forceinline__ void init_semaphore(semaphore &sem, int thread_count, int transaction_count = 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&sem)),
                 "r"(thread_count + transaction_count)
                 : "memory");
}

__device__ __forceinline__ void arrive(semaphore &sem, uint32_t count = 1) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&sem)), "r"(count)
                 : "memory");
}

__device__ __forceinline__ bool test_wait(semaphore &sem, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(&sem)), "r"(phase)
        : "memory");
    return done != 0;
}

__device__ __forceinline__ uint64_t global_timer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

// Debug builds define KITTENS_BOUNDED_WAITS as nanoseconds: a wait that lasts longer stops the kernel with an error. No
// function call is made (a printf here would serialise every wgmma and void the register re-allocation).
__device__ __forceinline__ void wait(semaphore &sem, uint32_t phase) {
#ifdef KITTENS_BOUNDED_WAITS
    const uint64_t start = global_timer_ns();
    while (!test_wait(sem, phase))
        if (global_timer_ns() - start > uint64_t(KITTENS_BOUNDED_WAITS)) asm volatile("trap;" ::: "memory");
#else
    while (!test_wait(sem, phase)) {}
#endif
}

// A position in a ring of STAGES buffers with the phase bit of its semaphores.
template <int STAGES> struct ring_position {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// ---- named barriers: ids from 1 (0 is __syncthreads); kernels list theirs in one enum.
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// ---- fences
// Semaphore initialisation, before other threads, the cluster or TMA use it.
__device__ __forceinline__ void fence_semaphore_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Generic writes to shared memory, before TMA or wgmma read it; by every writing thread, before the barrier.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// All state spaces: after an acquire of a flag, before this thread's TMA loads of what the flag covers.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
// Global memory alone: does not wait for this thread's own stores, as the one above does.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- flags in device memory, GPU scope
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t *flag) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ void add_release_gpu(uint32_t *flag, uint32_t value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// ---- clusters
__device__ __forceinline__ int cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)::"memory");
    return int(rank);
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- programmatic dependent launch
// Waits until the grids that this one was launched behind have completed and their writes are visible.
__device__ __forceinline__ void wait_prerequisite_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// This block no longer minds if a grid launched behind this one starts; it does when all blocks have said so or ended.
__device__ __forceinline__ void launch_dependent_grids() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- register re-allocation: by all warps of a warpgroup; counts are multiples of 8 in [24, 256].
template <int COUNT> __device__ __forceinline__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT) : "memory");
}
template <int COUNT> __device__ __forceinline__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT) : "memory");
}

// One lane of a converged warp, known to the compiler as one.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{ .reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(elected)::"memory");
    return elected != 0;
}

}  // namespace kittens
