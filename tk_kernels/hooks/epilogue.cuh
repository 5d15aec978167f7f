// Epilogue hooks: from one warp's fp32 accumulators to an output tile of 128-byte rows at a time.
#pragma once

#include "../engine/tile_task.cuh"

namespace moe_tk {

// The no-op twin: the accumulator as it is.
struct plain_epilogue {
    using out_type = kittens::bf16;
    static constexpr int COLUMN_RATIO = 1;  // accumulator columns per output column
    struct params {};
    // Output columns [64 CHUNK, 64 CHUNK + 64) of the warp's 16 rows, from slot `row` and output column `col`.
    template <int CHUNK, int N>
    __device__ static void chunk(const params &, const tile_task &, int /*row*/, int /*col*/, const kittens::rt_fl<16, N> &acc,
                                 kittens::rt_bf<16, 64> &out) {
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                out.tiles[0][t].data[k] = __float22bfloat162_rn(acc.tiles[0][4 * CHUNK + t].data[k]);
    }
};

// act(g, u) = g * sigmoid(alpha * g) * (u + beta), after limits on g (above) and u (both sides); times the routing weight.
struct swiglu_params {
    float alpha, beta;         // 1, 0: SwiGLU
    float limit;               // infinity: none
    const float *slot_weight;  // (slots,) routing weight of each slot, or nullptr: 1
};
__device__ __forceinline__ float swiglu(const swiglu_params &p, float g, float u) {
    g = kittens::min_nan(g, p.limit);
    u = kittens::min_nan(kittens::max_nan(u, -p.limit), p.limit);
    return g * __fdividef(u + p.beta, 1.0f + __expf(-p.alpha * g));
}
// The same with one special-function operation for a value instead of two: sigmoid(x) = (1 + tanh(x / 2)) / 2, within 2^-11
// of the largest output. For outputs that are rounded to e4m3 (2^-4).
__device__ __forceinline__ float swiglu_fast(const swiglu_params &p, float g, float u) {
    g = kittens::min_nan(g, p.limit);
    u = kittens::min_nan(kittens::max_nan(u, -p.limit), p.limit);
    const float half = 0.5f * g;
    return fmaf(half, kittens::tanh_approx(p.alpha * half), half) * (u + p.beta);
}
__device__ __forceinline__ float weight_of(const swiglu_params &p, int slot) {
    return p.slot_weight ? __ldg(p.slot_weight + slot) : 1.0f;
}

// Gate and up columns alternate in groups of 8, so that a thread holds both: accumulator columns [16 b, 16 b + 8) are gate
// and [16 b + 8, 16 b + 16) are up of output columns [8 b, 8 b + 8).
struct swiglu_epilogue {
    using out_type = kittens::bf16;
    static constexpr int COLUMN_RATIO = 2;
    using params = swiglu_params;
    template <int CHUNK, int N>
    __device__ static void chunk(const params &p, const tile_task &, int row, int /*col*/, const kittens::rt_fl<16, N> &acc,
                                 kittens::rt_bf<16, 64> &out) {
        const int slot = row + kittens::laneid() / 4;
        const float w[2] = {weight_of(p, slot), weight_of(p, slot + 8)};
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const auto &src = acc.tiles[0][8 * CHUNK + 2 * t + k / 2];
                const float2 g = src.data[k % 2], u = src.data[2 + k % 2];
                const float2 y{swiglu(p, g.x, u.x) * w[k % 2], swiglu(p, g.y, u.y) * w[k % 2]};
                out.tiles[0][t].data[k] = __float22bfloat162_rn(y);
            }
    }
};

// SwiGLU, then e4m3 with a new scale for each row and 128 output columns: q = y / scale, scale = max |y| / 448. The 128
// columns are 256 accumulator columns: a warpgroup's whole tile. Groups of 8 alternate as above, and inside 16 output
// columns the order is such that a thread holds 4 neighbours: column 2 q + i of group e is output column 4 q + 2 e + i.
struct swiglu_quantise_epilogue {
    using out_type = kittens::fp8e4m3;
    static constexpr int COLUMN_RATIO = 2;
    static constexpr float SMALLEST = 0x1p-100f;  // what is smaller becomes zero, so that no scale is without an inverse
    struct params {
        swiglu_params act;
        float *scales;   // (I / 128, stride)
        int64_t stride;  // slots, a multiple of 4
    };
    __device__ static __forceinline__ uint32_t quantise(float2 a, float2 b, float inverse) {
        const float2 low{a.x * inverse, a.y * inverse}, high{b.x * inverse, b.y * inverse};
        const uint32_t lo = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
        const uint32_t hi = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
        return lo | (hi << 16);
    }
    // Largest magnitude of a row over the 4 lanes that hold it; a NaN stays.
    __device__ static __forceinline__ float row_max(float m) {
        m = kittens::max_nan(m, __shfl_xor_sync(0xffffffff, m, 1));
        return kittens::max_nan(m, __shfl_xor_sync(0xffffffff, m, 2));
    }
    template <int CHUNK, int N>
    __device__ static void chunk(const params &p, const tile_task &, int row, int col, const kittens::rt_fl<16, N> &acc,
                                 kittens::rt_fp8e4m3<16, 128> &out) {
        static_assert(N == 256 && CHUNK == 0, "a scale covers 128 output columns, 256 of the accumulator");
        const int lane = kittens::laneid(), slot = row + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows slot and slot + 8
            const float w = weight_of(p.act, slot + 8 * half);
            float2 y[16];
            float largest = 0.0f;
#pragma unroll
            for (int t = 0; t < 16; ++t) {
                const float2 g = acc.tiles[0][t].data[half], u = acc.tiles[0][t].data[2 + half];
                y[t] = float2{swiglu_fast(p.act, g.x, u.x) * w, swiglu_fast(p.act, g.y, u.y) * w};
                largest = kittens::max_nan(largest, kittens::max_nan(fabsf(y[t].x), fabsf(y[t].y)));
            }
            largest = row_max(largest);
            const float scale = largest <= SMALLEST ? 1.0f : largest * (1.0f / 448.0f);  // a NaN stays
            const float inverse = 1.0f / scale;
            if (lane % 4 == 0) p.scales[(col / 128) * p.stride + slot + 8 * half] = scale;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                out.tiles[0][t].data[half].bits = quantise(y[4 * t], y[4 * t + 1], inverse);
                out.tiles[0][t].data[2 + half].bits = quantise(y[4 * t + 2], y[4 * t + 3], inverse);
            }
        }
    }
};

}  // namespace moe_tk
