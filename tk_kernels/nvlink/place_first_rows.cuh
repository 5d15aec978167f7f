// The first rows of gather_gemm, by the consumer warps: GEMM 1 cannot begin before the rows of its first tiles are there, and
// with random routing those are a large part of all rows. So the consumers place them before they have anything to multiply,
// with plain loads and stores; the movers go on from there.
#pragma once

#include "pull_rows.cuh"

namespace moe_tk::nvlink {

// How many rows of delivery_order the consumers take. With m slots for a row in random places, the first share x of the slots
// needs the share 1 - (1 - x)^m of the rows: all that the first tiles need; and so many that the movers, which place one
// row in the time in which 1 / (m pace) of it is consumed, are never overtaken later.
template <class T> __device__ __forceinline__ int rows_for_consumers(const pull_params<T> &p, int num_rows, int num_slots) {
    // GEMM 1 at 700 TFLOP/s (e4m3: 1100), movers at 0.58 TB/s (e4m3: 0.35, from the times of qwen3-30b-a3b), 128 columns of I:
    // measured on H200.
    constexpr float PACE_PER_COL_BLOCK = sizeof(T) == 1 ? 0.16f : 0.21f;
    if (num_rows == 0) return 0;
    const float m = fmaxf(1.01f, float(num_slots) / float(num_rows)), pace = p.col_blocks * PACE_PER_COL_BLOCK;
    const float first = fminf(1.0f, float(gridDim.x / p.col_blocks + 1) * p.row_block / float(num_slots));
    float share = 1.0f - __powf(1.0f - first, m);
    if (pace < m) {
        const float y = __powf(pace / m, 1.0f / (m - 1.0f));
        share = fmaxf(share, 1.0f - __powf(y, m) - pace * (1.0f - y));
    }
    return int(fminf(1.0f, share) * num_rows);
}

// One row by one warp, to all its slots.
template <class T>
__device__ __forceinline__ void place_row(const call_view &c, const pull_params<T> &p, const T *from, int row) {
    constexpr int VECTORS = 8;
    const int lane = kittens::laneid(), vectors = c.hidden / (16 / int(sizeof(T)));
    const int slot = lane < c.top_k ? __ldg(p.slots + int64_t(row) * c.top_k + lane) : -1;
    const uint32_t present = __ballot_sync(0xffffffff, slot >= 0);
    for (int first = lane; first < vectors + lane; first += 32 * VECTORS) {
        uint4 v[VECTORS];
#pragma unroll
        for (int u = 0; u < VECTORS; ++u)
            if (first + 32 * u < vectors) v[u] = __ldcg(reinterpret_cast<const uint4 *>(from) + first + 32 * u);
        for (uint32_t left = present; left != 0; left &= left - 1) {
            uint4 *to = reinterpret_cast<uint4 *>(p.gathered) + int64_t(__shfl_sync(0xffffffff, slot, __ffs(left) - 1)) * vectors;
#pragma unroll
            for (int u = 0; u < VECTORS; ++u)
                if (first + 32 * u < vectors) to[first + 32 * u] = v[u];
        }
    }
    if constexpr (sizeof(T) == 1) {
        const float *scales = reinterpret_cast<const float *>(from + c.hidden);
        for (int base = 0; base < c.hidden / 128; base += 32) {
            const int i = base + lane;
            const float scale = i < c.hidden / 128 ? __ldcg(scales + i) : 0.0f;
            for (uint32_t left = present; left != 0; left &= left - 1) {
                const int to = __shfl_sync(0xffffffff, slot, __ffs(left) - 1);
                if (i < c.hidden / 128) p.scales[i * p.scales_stride + to] = scale;
            }
        }
    }
    // ORDER rows_ready: every lane's stores, made visible to TMA; then released to arrival_gate.
    kittens::fence_proxy_async();
    __syncwarp();
    if (slot >= 0) add_release_gpu(p.arrived + slot / p.row_block, 1u);
}

template <class T> __device__ __forceinline__ void place_first_rows(const call_view &c, const pull_params<T> &p) {
    if (!p.consumers_place) return;
    const int num_rows = __ldg(p.counts + COUNT_JOBS), limit = rows_for_consumers(p, num_rows, __ldg(p.counts + COUNT_SLOTS));
    row_sources<T> sources(c, p.tokens);
    for (int taken = 0; taken < limit;) {
        taken = take_item(p.next_row);
        if (taken >= num_rows) return;
        const int row = __ldg(p.delivery_order + taken);
        const T *from = sources.find(row);
        if (from == nullptr) return;
        place_row(c, p, from, row);
    }
}

}  // namespace moe_tk::nvlink
