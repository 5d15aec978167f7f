// warpgroup matrix operations: D (+)= A * B^T with both operands K-major in shared memory, asynchronous.
// Order of use: mma_fence(D); mm_ABt / mma_ABt ...; mma_commit_group(); mma_async_wait<N>(D); then D may be read.
#pragma once

#include "../types/rt.cuh"
#include "../types/st.cuh"
#include "wgmma_ptx.cuh"

namespace kittens {

template <int GROUP_WARPS> struct group_wgmma {
    static_assert(GROUP_WARPS == WARPGROUP_WARPS);

    // Before the first mma on registers that this thread has touched.
    template <class D> static __device__ __forceinline__ void mma_fence(D &d) {
        pin(d);
        mma_fence();
    }
    // Before further mmas on registers that only mmas have touched since.
    static __device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
    static __device__ __forceinline__ void mma_commit_group() {
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    // All but the newest N groups are complete.
    template <int N = 0> static __device__ __forceinline__ void mma_async_wait() {
        asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
    }
    template <int N = 0, class D> static __device__ __forceinline__ void mma_async_wait(D &d) {
        mma_async_wait<N>();
        pin(d);
    }

    // D = A B^T when `accumulate` is 0, else D += A B^T. A is 64 x K, B is N x K, one panel each.
    template <int N, class A, class B>
    static __device__ __forceinline__ void mma_ABt(rt_fl<16, N> &d, const A &a, const B &b, int accumulate = 1) {
        mma_ABt_steps<0, A::row_bytes / K_BYTES>(d, a, b, accumulate);
    }
    // The same for COUNT instructions of K (32 bytes each) from FIRST on.
    template <int FIRST, int COUNT, int N, class A, class B>
    static __device__ __forceinline__ void mma_ABt_steps(rt_fl<16, N> &d, const A &a, const B &b, int accumulate) {
        using T = typename A::dtype;
        static_assert(std::is_same_v<T, typename B::dtype>, "A and B have one element type");
        static_assert(A::rows == 64 && B::rows == N && A::cols == B::cols, "A is 64 x K, B is N x K");
        static_assert(A::num_panels == 1 && B::num_panels == 1, "operands are one panel wide");
        static_assert(FIRST >= 0 && FIRST + COUNT <= A::row_bytes / K_BYTES, "steps lie in the panel");
        const uint64_t desc_a = detail::wgmma_descriptor<A::swizzle_bytes>(shared_address(a.data));
        const uint64_t desc_b = detail::wgmma_descriptor<B::swizzle_bytes>(shared_address(b.data));
#pragma unroll
        for (int k = FIRST; k < FIRST + COUNT; ++k)
            detail::wgmma<T, N>::mma(d, desc_a + k * (K_BYTES >> 4), desc_b + k * (K_BYTES >> 4), k > FIRST || accumulate);
    }
    template <int N, class A, class B>
    static __device__ __forceinline__ void mm_ABt(rt_fl<16, N> &d, const A &a, const B &b) {
        mma_ABt(d, a, b, 0);
    }

  private:
    static constexpr int K_BYTES = 32;  // of one instruction
    // Ties the registers to this point: the compiler may not move a read of D before a wait, or a write after a fence.
    template <int N> static __device__ __forceinline__ void pin(rt_fl<16, N> &d) {
#pragma unroll
        for (int t = 0; t < N / 16; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                asm volatile("" : "+f"(d.tiles[0][t].data[k].x), "+f"(d.tiles[0][t].data[k].y)::"memory");
    }
};

}  // namespace kittens
