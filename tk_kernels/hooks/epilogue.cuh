// bf16 epilogue hooks: from one warp's fp32 accumulators to 64 output columns at a time.
#pragma once

#include "../engine/tile_task.cuh"

namespace moe_tk {

// The no-op twin: the accumulator as it is.
struct plain_epilogue {
    static constexpr int COLUMN_RATIO = 1;  // accumulator columns per output column
    struct params {};
    template <int CHUNK, int N>
    __device__ static void chunk(const params &, const tile_task &, int, const kittens::rt_fl<16, N> &acc,
                                 kittens::rt_bf<16, 64> &out) {
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                out.tiles[0][t].data[k] = __float22bfloat162_rn(acc.tiles[0][4 * CHUNK + t].data[k]);
    }
};

// act(g, u) = g * sigmoid(alpha * g) * (u + beta), after limits on g (above) and u (both sides); times the routing weight.
// Gate and up columns alternate in groups of 8, so that a thread holds both: accumulator columns [16 b, 16 b + 8) are gate
// and [16 b + 8, 16 b + 16) are up of output columns [8 b, 8 b + 8).
struct swiglu_epilogue {
    static constexpr int COLUMN_RATIO = 2;
    static constexpr int INTERLEAVE = 8;
    struct params {
        float alpha, beta;         // 1, 0: SwiGLU
        float limit;               // infinity: none
        const float *slot_weight;  // (slots,) routing weight of each slot, or nullptr: 1
    };
    __device__ static __forceinline__ float act(const params &p, float g, float u) {
        g = kittens::min_nan(g, p.limit);
        u = kittens::min_nan(kittens::max_nan(u, -p.limit), p.limit);
        return g * __fdividef(u + p.beta, 1.0f + __expf(-p.alpha * g));
    }
    template <int CHUNK, int N>
    __device__ static void chunk(const params &p, const tile_task &, int row, const kittens::rt_fl<16, N> &acc,
                                 kittens::rt_bf<16, 64> &out) {
        const int slot = row + kittens::laneid() / 4;
        const float w[2] = {p.slot_weight ? __ldg(p.slot_weight + slot) : 1.0f,
                            p.slot_weight ? __ldg(p.slot_weight + slot + 8) : 1.0f};
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const auto &src = acc.tiles[0][8 * CHUNK + 2 * t + k / 2];
                const float2 g = src.data[k % 2], u = src.data[2 + k % 2];
                const float2 y{act(p, g.x, u.x) * w[k % 2], act(p, g.y, u.y) * w[k % 2]};
                out.tiles[0][t].data[k] = __float22bfloat162_rn(y);
            }
    }
};

}  // namespace moe_tk
