// Register tiles of one warp: element by element, along rows, and between types.
#pragma once

#include "../types/rt.cuh"

namespace kittens {

struct warp_registers {
    template <int R, int C> static __device__ __forceinline__ void zero(rt_fl<R, C> &d) {
        each(d, [](float2 &v) { v = float2{0.0f, 0.0f}; });
    }
    template <int R, int C> static __device__ __forceinline__ void copy(rt_bf<R, C> &d, const rt_fl<R, C> &s) {
        each(d, s, [](bf16_2 &v, const float2 &x) { v = __float22bfloat162_rn(x); });
    }
    template <int R, int C> static __device__ __forceinline__ void copy(rt_fl<R, C> &d, const rt_bf<R, C> &s) {
        each(d, s, [](float2 &v, const bf16_2 &x) { v = __bfloat1622float2(x); });
    }
    template <int R, int C> static __device__ __forceinline__ void add(rt_fl<R, C> &d, const rt_fl<R, C> &s) {
        each(d, s, [](float2 &v, const float2 &x) { v.x += x.x, v.y += x.y; });
    }
    template <int R, int C> static __device__ __forceinline__ void mul(rt_fl<R, C> &d, const rt_fl<R, C> &s) {
        each(d, s, [](float2 &v, const float2 &x) { v.x *= x.x, v.y *= x.y; });
    }
    // Row r times v[r].
    template <int R, int C> static __device__ __forceinline__ void mul_row(rt_fl<R, C> &d, const col_vec<float, R> &v) {
#pragma unroll
        for (int i = 0; i < rt_fl<R, C>::height; ++i)
#pragma unroll
            for (int j = 0; j < rt_fl<R, C>::width; ++j)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    d.tiles[i][j].data[k].x *= v.data[i][k % 2], d.tiles[i][j].data[k].y *= v.data[i][k % 2];
    }
    // Sum and largest value of each row; a NaN stays in the largest.
    template <int R, int C> static __device__ __forceinline__ void row_sum(col_vec<float, R> &v, const rt_fl<R, C> &s) {
        row_reduce(v, s, [](float a, float b) { return a + b; });
    }
    template <int R, int C> static __device__ __forceinline__ void row_max(col_vec<float, R> &v, const rt_fl<R, C> &s) {
        row_reduce(v, s, [](float a, float b) { return max_nan(a, b); });
    }

  private:
    template <class D, class F> static __device__ __forceinline__ void each(D &d, F &&f) {
#pragma unroll
        for (int i = 0; i < D::height; ++i)
#pragma unroll
            for (int j = 0; j < D::width; ++j)
#pragma unroll
                for (int k = 0; k < 4; ++k) f(d.tiles[i][j].data[k]);
    }
    template <class D, class S, class F> static __device__ __forceinline__ void each(D &d, const S &s, F &&f) {
        static_assert(D::height == S::height && D::width == S::width, "tiles have one shape");
#pragma unroll
        for (int i = 0; i < D::height; ++i)
#pragma unroll
            for (int j = 0; j < D::width; ++j)
#pragma unroll
                for (int k = 0; k < 4; ++k) f(d.tiles[i][j].data[k], s.tiles[i][j].data[k]);
    }
    template <int R, int C, class F>
    static __device__ __forceinline__ void row_reduce(col_vec<float, R> &v, const rt_fl<R, C> &s, F &&f) {
#pragma unroll
        for (int i = 0; i < rt_fl<R, C>::height; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float r = f(s.tiles[i][0].data[half].x, s.tiles[i][0].data[half].y);
#pragma unroll
                for (int j = 0; j < rt_fl<R, C>::width; ++j)
#pragma unroll
                    for (int k = half; k < 4; k += 2)
                        if (j > 0 || k > half) r = f(r, f(s.tiles[i][j].data[k].x, s.tiles[i][j].data[k].y));
                r = f(r, __shfl_xor_sync(0xffffffff, r, 1));  // the 4 lanes of a row
                v.data[i][half] = f(r, __shfl_xor_sync(0xffffffff, r, 2));
            }
    }
};

}  // namespace kittens
