// mma.sync: D (16 M x 16 N, fp32) += A (M x K) * B (N x K)^T by one warp, all in registers, row layout. bf16 from SM80 on, e4m3
// from SM89 on.
#pragma once

#include <type_traits>

#include "../types/rt.cuh"

namespace kittens {

namespace detail {

// One instruction: 16 x 8 of D, 32 bytes of K.
template <class T>
__device__ __forceinline__ void mma_16x8(float2 &upper, float2 &lower, const typename packed<T>::type (&a)[4],
                                         const typename packed<T>::type &b0, const typename packed<T>::type &b1) {
    const uint32_t *x = reinterpret_cast<const uint32_t *>(a);
    const uint32_t y0 = reinterpret_cast<const uint32_t &>(b0), y1 = reinterpret_cast<const uint32_t &>(b1);
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(upper.x), "+f"(upper.y), "+f"(lower.x), "+f"(lower.y)
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1)
                     : "memory");
    else
        asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(upper.x), "+f"(upper.y), "+f"(lower.x), "+f"(lower.y)
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1)
                     : "memory");
}

}  // namespace detail

struct warp_mma {
    template <class T, int M, int N, int K>
    static __device__ __forceinline__ void mma_ABt(rt_fl<M, N> &d, const rt<T, M, K> &a, const rt<T, N, K> &b) {
#pragma unroll
        for (int i = 0; i < rt_fl<M, N>::height; ++i)
#pragma unroll
            for (int j = 0; j < rt_fl<M, N>::width; ++j)
#pragma unroll
                for (int k = 0; k < rt<T, M, K>::width; ++k) {
                    const auto &x = a.tiles[i][k].data, &y = b.tiles[j][k].data;
                    auto &out = d.tiles[i][j].data;
                    detail::mma_16x8<T>(out[0], out[1], x, y[0], y[2]);  // columns 0-7: rows 0-7 of B
                    detail::mma_16x8<T>(out[2], out[3], x, y[1], y[3]);
                }
    }
};

}  // namespace kittens
