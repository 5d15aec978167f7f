// Export of this rank's tokens: the blocks of open_call that do not build write each row to the ranks that have work for it,
// once each. Who wants a row follows from this rank's own routing, so the wire is busy while the tables are built.
#pragma once

#include "exchange.cuh"

namespace moe_tk::nvlink {

// Ranks that have an expert of the token, one bit each; the same in all lanes.
__device__ __forceinline__ uint32_t wanted_by(const open_globals &g, int token) {
    const call_view &c = g.call;
    const int lane = threadIdx.x % 32;
    const int id = lane < c.top_k ? read_id(g, int64_t(token) * c.top_k + lane) : -1;
    uint32_t ranks = 0;
    if (id >= 0) ranks = g.tensor_parallel ? ~0u >> (32 - c.world) : 1u << owner_of(g, id);
    return __reduce_or_sync(0xffffffff, ranks);
}

// One row by one warp; all its loads are in flight together.
__device__ __forceinline__ void send_row(const open_globals &g, int token, uint32_t ranks) {
    constexpr int VECTORS = 4;
    const call_view &c = g.call;
    const int vectors = c.hidden / 8, lane = threadIdx.x % 32;
    const uint4 *from = static_cast<const uint4 *>(g.hidden_states) + int64_t(token) * vectors;
    for (int first = lane; ranks != 0 && first < vectors; first += 32 * VECTORS) {
        uint4 v[VECTORS];
#pragma unroll
        for (int u = 0; u < VECTORS; ++u)
            if (first + 32 * u < vectors) v[u] = __ldg(from + first + 32 * u);
        for (uint32_t left = ranks; left != 0; left &= left - 1) {
            uint4 *to = reinterpret_cast<uint4 *>(c.row<uint16_t>(__ffs(left) - 1, c.rank, token));
#pragma unroll
            for (int u = 0; u < VECTORS; ++u)
                if (first + 32 * u < vectors) to[first + 32 * u] = v[u];
        }
    }
}

// Behind the rows on the wire, the routing that everybody waits for would come tens of microseconds later. A matter of pace
// only: the building cluster may not even be resident, so this does not wait for long.
__device__ __forceinline__ void let_routing_go_first(const open_globals &g, uint32_t epoch) {
    constexpr uint64_t LIMIT_NS = 20'000;
    const uint64_t begin = now_ns();
    while (!protocol::reached(load_relaxed_sys(g.routing_sent), epoch) && now_ns() - begin < LIMIT_NS) nap_ns(100);
}

// ORDER rows: the rows, then the last block's st.release.sys of the epoch; row_puller acquires it before its first load.
// A row's place is free: whoever read it in the call before owed this rank a partial row, and that call is done. Where no
// partial row was owed (dispatch_gemm), its reader's header of this call says so.
__device__ __forceinline__ void export_rows(const open_globals &g, uint32_t epoch) {
    const call_view &c = g.call;
    const int num_blocks = gridDim.x - OPEN_CLUSTER, block = blockIdx.x - OPEN_CLUSTER;
    const int tokens = g.refused ? 0 : g.num_tokens;
    const uint32_t others = g.hidden_states == nullptr ? 0u : ~(1u << c.rank);  // a call without rows sends none
    if (threadIdx.x == 0) let_routing_go_first(g, epoch);
    const int from = int(threadIdx.x);
    if (g.export_waits && from < c.world && from != c.rank)
        spin_until(c.posted(c.rank, from), epoch, c, {phase_id::exchange, role_id::send, from, from});
    __syncthreads();
    for (int token = int(threadIdx.x / 32) * num_blocks + block; token < tokens; token += OPEN_WARPS * num_blocks) {
        const uint32_t ranks = wanted_by(g, token);
        if (threadIdx.x % 32 == 0) g.tables.contributors[token] = ranks;
        send_row(g, token, ranks & others);
    }
    __syncthreads();
    stamp_lap_block(stamp_kind::open_export);
    if (threadIdx.x != 0) return;
    fence_sys();
    if (fetch_inc_wrap_acq_rel_gpu(g.copies_done, num_blocks - 1) != uint32_t(num_blocks - 1)) return;
    fence_sys();
    for (int to = 0; to < c.world; ++to) store_release_sys(c.rows_posted(to, c.rank), epoch);
}

}  // namespace moe_tk::nvlink
