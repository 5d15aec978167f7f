// group<N>: what N consecutive warps do together. warp = group<1>, warpgroup = group<4>.
#pragma once

#include "memory.cuh"
#include "mma.cuh"
#include "registers.cuh"
#include "sync.cuh"
#include "wgmma.cuh"

namespace kittens {

template <int GROUP_WARPS> struct group_base : group_memory<GROUP_WARPS> {
    static constexpr int num_warps = GROUP_WARPS, num_threads = GROUP_WARPS * WARP_THREADS;
    static __device__ __forceinline__ int groupid() { return warpid() / GROUP_WARPS; }
    static __device__ __forceinline__ int laneid() { return threadIdx.x % num_threads; }
    static __device__ __forceinline__ void sync(int barrier_id) { named_barrier_sync(barrier_id, num_threads); }
};

template <int GROUP_WARPS> struct group : group_base<GROUP_WARPS> {};
template <> struct group<1> : group_base<1>, warp_mma, warp_registers {
    static __device__ __forceinline__ void sync() { __syncwarp(); }
};
template <> struct group<WARPGROUP_WARPS> : group_base<WARPGROUP_WARPS>, group_wgmma<WARPGROUP_WARPS> {
    template <int COUNT> static __device__ __forceinline__ void increase_registers() {
        kittens::increase_registers<COUNT>();
    }
    template <int COUNT> static __device__ __forceinline__ void decrease_registers() {
        kittens::decrease_registers<COUNT>();
    }
};

using warp = group<1>;
using warpgroup = group<WARPGROUP_WARPS>;

}  // namespace kittens
