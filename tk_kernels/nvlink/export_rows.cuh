// Export of this rank's tokens: the blocks of open_call that do not build copy them where the ranks read them. For an e4m3
// layer they are quantised on the way: a row is H bytes and, behind them, H / 128 scales.
#pragma once

#include <cuda_fp8.h>

#include "../../thunderkittens/kittens.cuh"
#include "open_globals.cuh"

namespace moe_tk::nvlink {

// bf16 rows as they are.
__device__ __forceinline__ void copy_rows(const open_globals &g, int block, int num_blocks) {
    const call_view &c = g.call;
    const int64_t vectors = int64_t(g.num_tokens) * c.hidden / 8, stride = int64_t(num_blocks) * OPEN_THREADS;
    const uint4 *from = static_cast<const uint4 *>(g.hidden_states);
    uint4 *to = c.row<uint4>(c.rank, 0);
    int64_t i = int64_t(block) * OPEN_THREADS + threadIdx.x;
    for (; i + 3 * stride < vectors; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) v[u] = __ldg(from + i + u * stride);
#pragma unroll
        for (int u = 0; u < 4; ++u) to[i + u * stride] = v[u];
    }
    for (; i < vectors; i += stride) to[i] = __ldg(from + i);
}

// 128 columns of one row are quantised by 16 lanes, 8 columns each.
constexpr int SCALE_COLUMNS = 128, SCALE_LANES = 16;
constexpr float SMALLEST = 0x1p-100f;  // what is smaller becomes zero, so that no scale is without an inverse

// Largest magnitude of 8 bf16 in each of 16 lanes; a NaN stays.
__device__ __forceinline__ float largest_of(const uint4 &v) {
    const auto pair = [](uint32_t word) {
        word &= 0x7fff7fffu;
        return *reinterpret_cast<const __nv_bfloat162 *>(&word);
    };
    __nv_bfloat162 m = __hmax2_nan(__hmax2_nan(pair(v.x), pair(v.y)), __hmax2_nan(pair(v.z), pair(v.w)));
#pragma unroll
    for (int d = 1; d < SCALE_LANES; d *= 2) m = __hmax2_nan(m, __shfl_xor_sync(0xffffffff, m, d));
    return kittens::max_nan(__low2float(m), __high2float(m));
}
__device__ __forceinline__ uint32_t quantise_pairs(uint32_t low, uint32_t high, float inverse) {
    const auto pair = [inverse](uint32_t word) {
        const float2 x{__uint_as_float(word << 16) * inverse, __uint_as_float(word & 0xffff0000u) * inverse};
        return uint32_t(__nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3));
    };
    return pair(low) | pair(high) << 16;
}

// q = x / scale with scale = max |x| / 448 (1 where there is nothing) for each row and 128 columns; rows that come with scales
// are copied. Warps take pairs of column blocks, BATCH of them at a time to have enough loads in flight.
__device__ __forceinline__ void quantise_rows(const open_globals &g, int block, int num_blocks) {
    constexpr int BATCH = 4;
    const call_view &c = g.call;
    const int lane = threadIdx.x % SCALE_LANES, half = threadIdx.x % 32 / SCALE_LANES, stride = num_blocks * OPEN_WARPS;
    const int per_row = int(g.scale_blocks.value), num_groups = g.num_tokens * per_row;
    for (int pair = block * OPEN_WARPS + int(threadIdx.x) / 32; 2 * pair < num_groups; pair += BATCH * stride) {
        uint4 v[BATCH];
        float scale[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int group = 2 * (pair + u * stride) + half;
            const int64_t vector = int64_t(group) * SCALE_LANES + lane;
            v[u] = {0, 0, 0, 0};
            if (group >= num_groups) continue;
            if (g.hidden_scales) {
                const uint2 bytes = __ldg(static_cast<const uint2 *>(g.hidden_states) + vector);
                v[u].x = bytes.x, v[u].y = bytes.y;
                scale[u] = __ldg(g.hidden_scales + group);
            } else {
                v[u] = __ldg(static_cast<const uint4 *>(g.hidden_states) + vector);
            }
        }
#pragma unroll
        for (int u = 0; u < BATCH; ++u) {
            const int group = 2 * (pair + u * stride) + half, row = g.scale_blocks.divide(group), column = group - row * per_row;
            uint2 quantised{v[u].x, v[u].y};
            if (!g.hidden_scales) {
                const float largest = largest_of(v[u]);
                scale[u] = largest <= SMALLEST ? 1.0f : largest * (1.0f / 448.0f);
                const float inverse = __frcp_rn(scale[u]);
                quantised = {quantise_pairs(v[u].x, v[u].y, inverse), quantise_pairs(v[u].z, v[u].w, inverse)};
            }
            if (group >= num_groups) continue;
            uint8_t *to = c.row<uint8_t>(c.rank, row);
            *reinterpret_cast<uint2 *>(to + column * SCALE_COLUMNS + lane * 8) = quantised;
            if (lane == 0) *reinterpret_cast<float *>(to + c.hidden + column * 4) = scale[u];
        }
    }
}

// ORDER rows: the copies, then the last block's st.release.sys of the epoch; pull_rows acquires it before its first load.
__device__ __forceinline__ void export_rows(const open_globals &g, uint32_t epoch) {
    const call_view &c = g.call;
    const int num_blocks = gridDim.x - OPEN_CLUSTER, block = blockIdx.x - OPEN_CLUSTER;
    if (!g.refused && g.quantise) quantise_rows(g, block, num_blocks);
    else if (!g.refused) copy_rows(g, block, num_blocks);
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_sys();
    if (fetch_inc_wrap_acq_rel_gpu(g.copies_done, num_blocks - 1) != uint32_t(num_blocks - 1)) return;
    fence_sys();
    for (int to_rank = 0; to_rank < c.world; ++to_rank) store_release_sys(c.rows_posted(to_rank, c.rank), epoch);
}

}  // namespace moe_tk::nvlink
