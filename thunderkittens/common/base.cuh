// Element types, packed types, thread indices and compile-time helpers of the tile library.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

namespace kittens {

using bf16 = __nv_bfloat16;
using bf16_2 = __nv_bfloat162;
using fp8e4m3 = __nv_fp8_e4m3;

// Four e4m3 values in one 32-bit register, lowest column in the lowest byte.
struct alignas(4) fp8e4m3_4 {
    uint32_t bits;
};

constexpr int WARP_THREADS = 32;
constexpr int WARPGROUP_WARPS = 4;
constexpr int WARPGROUP_THREADS = WARPGROUP_WARPS * WARP_THREADS;
constexpr int TILE_DIM = 16;              // rows of a register base tile
constexpr int SWIZZLE_BYTES = 128;        // widest swizzle of the hardware
constexpr int MAX_SHARED_MEMORY = 227 * 1024;        // a block on SM90 and SM100
constexpr int MAX_SHARED_MEMORY_SM120 = 99 * 1024;   // a block on SM120 and SM89

template <class Int> __host__ __device__ constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
template <class Int> __host__ __device__ constexpr Int round_up(Int a, Int b) { return ceil_div(a, b) * b; }

__device__ __forceinline__ int laneid() { return threadIdx.x & (WARP_THREADS - 1); }
// Uniform in the warp: the shuffle lets the compiler keep it in a uniform register.
__device__ __forceinline__ int warpid() { return __shfl_sync(0xffffffff, threadIdx.x / WARP_THREADS, 0); }
__device__ __forceinline__ int warpgroupid() { return warpid() / WARPGROUP_WARPS; }

// Address of a shared object in the shared window, as the PTX instructions want it.
template <class T> __device__ __forceinline__ uint32_t shared_address(const T *ptr) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(const_cast<void *>(static_cast<const void *>(ptr))));
}

// Minimum and maximum that keep a NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float max_nan(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float tanh_approx(float x) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Carves aligned objects out of dynamic shared memory, in order.
struct shared_allocator {
    uint8_t *next;
    __device__ explicit shared_allocator(void *base) : next(static_cast<uint8_t *>(base)) {}
    template <class T, int ALIGN = 1024> __device__ T &allocate() {
        const uint32_t here = shared_address(next);
        next += round_up<uint32_t>(here, ALIGN) - here;
        T &object = *reinterpret_cast<T *>(next);
        next += sizeof(T);
        return object;
    }
};

}  // namespace kittens
