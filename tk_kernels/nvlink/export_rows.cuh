// Export of this rank's tokens: the blocks of open_call that do not build copy them where the other ranks read them.
#pragma once

#include "open_globals.cuh"

namespace moe_tk::nvlink {

// ORDER rows: the copies, then the last block's st.release.sys of the epoch; pull_rows acquires it before its first load.
__device__ __forceinline__ void export_rows(const open_globals &g, uint32_t epoch) {
    const call_view &c = g.call;
    const int num_blocks = gridDim.x - OPEN_CLUSTER, block = blockIdx.x - OPEN_CLUSTER;
    const int64_t vectors = g.refused || g.hidden_states == nullptr ? 0 : int64_t(g.num_tokens) * c.hidden / 8, stride = int64_t(num_blocks) * OPEN_THREADS;
    const uint4 *from = static_cast<const uint4 *>(g.hidden_states);
    uint4 *to = c.row<uint4>(c.rank, 0);
    if (g.export_waits) {
        if (int(threadIdx.x) < c.world)
            spin_until(c.posted(c.rank, threadIdx.x), epoch, c, {phase_id::exchange, role_id::send, int(threadIdx.x), int(threadIdx.x)});
        __syncthreads();
    }
    int64_t i = int64_t(block) * OPEN_THREADS + threadIdx.x;
    for (; i + 3 * stride < vectors; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) v[u] = __ldg(from + i + u * stride);
#pragma unroll
        for (int u = 0; u < 4; ++u) to[i + u * stride] = v[u];
    }
    for (; i < vectors; i += stride) to[i] = __ldg(from + i);
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_sys();
    if (fetch_inc_wrap_acq_rel_gpu(g.copies_done, num_blocks - 1) != uint32_t(num_blocks - 1)) return;
    fence_sys();
    for (int to_rank = 0; to_rank < c.world; ++to_rank) store_release_sys(c.rows_posted(to_rank, c.rank), epoch);
}

}  // namespace moe_tk::nvlink
