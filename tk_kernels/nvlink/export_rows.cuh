// Export of this rank's tokens: the blocks of open_call that do not build write each row to the ranks that have work for it,
// once each. Who wants a row follows from this rank's own routing, so the wire is busy while the tables are built. For an e4m3
// layer rows are quantised on the way, and sent to this rank itself too: a row is H bytes and, behind them, H / 128 scales.
#pragma once

#include <cuda_fp8.h>

#include "../../thunderkittens/kittens.cuh"
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

// One bf16 row by one warp; all its loads are in flight together.
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

// 128 columns of one row are quantised by 16 lanes, 8 columns each.
constexpr int SCALE_LANES = 16;
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

// One row as e4m3 with its scales by one warp: q = x / scale with scale = max |x| / 448 (1 where there is nothing) for each 128
// columns. Rows that come with scales are sent as they are.
__device__ __forceinline__ void send_scaled_row(const open_globals &g, int token, uint32_t ranks) {
    constexpr int VECTORS = 4;
    const call_view &c = g.call;
    const int vectors = c.hidden / 8, lane = threadIdx.x % 32;
    const int64_t row = int64_t(token) * vectors;
    for (int first = 0; ranks != 0 && first < vectors; first += 32 * VECTORS) {
        uint4 v[VECTORS];
        float scale[VECTORS];
#pragma unroll
        for (int u = 0; u < VECTORS; ++u) {
            const int i = first + 32 * u + lane;
            v[u] = {0, 0, 0, 0};
            if (i >= vectors) continue;
            if (g.hidden_scales) {
                const uint2 bytes = __ldg(static_cast<const uint2 *>(g.hidden_states) + row + i);
                v[u].x = bytes.x, v[u].y = bytes.y;
                scale[u] = __ldg(g.hidden_scales + (row + i) / SCALE_LANES);
            } else {
                v[u] = __ldg(static_cast<const uint4 *>(g.hidden_states) + row + i);
            }
        }
#pragma unroll
        for (int u = 0; u < VECTORS; ++u) {
            const int i = first + 32 * u + lane;
            uint2 quantised{v[u].x, v[u].y};
            if (!g.hidden_scales) {
                const float largest = largest_of(v[u]);
                scale[u] = largest <= SMALLEST ? 1.0f : largest * (1.0f / 448.0f);
                const float inverse = __frcp_rn(scale[u]);
                quantised = {quantise_pairs(v[u].x, v[u].y, inverse), quantise_pairs(v[u].z, v[u].w, inverse)};
            }
            for (uint32_t left = i < vectors ? ranks : 0; left != 0; left &= left - 1) {
                uint8_t *to = c.row<uint8_t>(__ffs(left) - 1, c.rank, token);
                reinterpret_cast<uint2 *>(to)[i] = quantised;
                if (i % SCALE_LANES == 0) reinterpret_cast<float *>(to + c.hidden)[i / SCALE_LANES] = scale[u];
            }
        }
    }
}

static_assert(MAX_COL_GROUPS == 4, "zero_counters clears the counters of a row block and of a chunk as one vector");
// By the blocks that do not build, which have the time: gather_gemm waits for the end of the launch, whoever zeroes. All blocks
// that the workspace has, since nobody here knows how many of them this call uses.
__device__ __forceinline__ void zero_counters(const open_globals &g, int thread, int threads) {
    const uint4 none{};
    for (int i = thread; i < g.max_blocks; i += threads) {
        g.counters.l1_done[i] = 0;
        reinterpret_cast<uint4 *>(g.counters.l2_done)[i] = none;
    }
    for (int i = thread; i < g.call.world * g.call.job_chunks; i += threads) reinterpret_cast<uint4 *>(g.counters.job_done)[i] = none;
    if (thread == 0) *g.counters.next_item = 0;
}

// Watermarks of chunks for which this rank has had no work for a long time would seem to be ahead one day: every so often
// all of them are set to the call before, whose own watermarks this rank has published to the last. Those of this call follow
// from a later launch.
__device__ __forceinline__ void refresh_watermarks(const open_globals &g, int thread, int threads, uint32_t epoch) {
    if (!protocol::refreshes(epoch)) return;
    const int words = g.call.job_chunks * MAX_COL_GROUPS;
    for (int i = thread; i < g.call.world * words; i += threads) g.call.combined(i / words, g.call.rank, 0, 0)[i % words] = epoch - 1;
}

// Behind the rows on the wire, the routing that everybody waits for would come tens of microseconds later. A matter of pace
// only: the building cluster may not even be resident, so this does not wait for long.
__device__ __forceinline__ void let_routing_go_first(const open_globals &g, uint32_t epoch) {
    constexpr uint64_t LIMIT_NS = 20'000;
    const uint64_t begin = now_ns();
    while (!protocol::reached(load_relaxed_sys(g.routing_sent), epoch) && now_ns() - begin < LIMIT_NS) nap_ns(100);
}

// The last block to have sent waits for the rows of the other ranks, while the building cluster is at its tables: when open_call is
// over all rows are there, so that whoever reads them waits for its end and for nothing else. Rows that this rank sends to
// itself (e4m3) are its own blocks' work. After a wait that was given up the call goes on with whatever rows there are.
// A rank whose header has not come is missing in the exchange, whichever of its waits is given up first: so that is waited for first.
// ORDER rows: a lane for each rank acquires what its last sending block releases; then the end of this grid.
__device__ __forceinline__ void await_rows(const call_view &c, uint32_t epoch) {
    const int from = int(threadIdx.x);
    if (from >= c.world || from == c.rank || protocol::reached(load_acquire_sys(c.rows_posted(c.rank, from)), epoch)) return;
    if (spin_until(c.posted(c.rank, from), epoch, c, {phase_id::exchange, role_id::place, from, from}))
        spin_until(c.rows_posted(c.rank, from), epoch, c, {phase_id::dispatch, role_id::place, from, from});
}

// ORDER rows: the rows, then the last block's st.release.sys of the epoch, which await_rows of the other ranks acquires.
// A row's place is free: whoever read it in the call before owed this rank a partial row, and that call is done. Where no
// partial row was owed (dispatch_gemm), its reader's header of this call says so.
__device__ __forceinline__ void export_rows(const open_globals &g, uint32_t epoch) {
    const call_view &c = g.call;
    const int num_blocks = gridDim.x - OPEN_CLUSTER, block = blockIdx.x - OPEN_CLUSTER;
    // A call without rows sends none (gemm_combine). e4m3 ones go to this rank too.
    const uint32_t takers = g.hidden_states == nullptr ? 0u : g.quantise ? ~0u : ~(1u << c.rank);
    const int thread = block * OPEN_THREADS + int(threadIdx.x), threads = num_blocks * OPEN_THREADS;
    zero_counters(g, thread, threads);
    refresh_watermarks(g, thread, threads, epoch);
    stamp_lap_block(stamp_kind::open_zero);
    if (threadIdx.x == 0) let_routing_go_first(g, epoch);
    const int from = int(threadIdx.x);
    bool heard = true;
    if (g.export_waits && from < c.world && from != c.rank)
        heard = spin_until(c.posted(c.rank, from), epoch, c, {phase_id::exchange, role_id::send, from, from});
    // Given up: a rank that is late may still read what it was sent in the call before.
    const int tokens = __syncthreads_and(heard) && !g.refused ? g.num_tokens : 0;
    for (int token = int(threadIdx.x / 32) * num_blocks + block; token < tokens; token += OPEN_WARPS * num_blocks) {
        const uint32_t ranks = wanted_by(g, token);
        if (threadIdx.x % 32 == 0) g.tables.contributors[token] = ranks;
        if (g.quantise) send_scaled_row(g, token, ranks & takers);
        else send_row(g, token, ranks & takers);
    }
    __syncthreads();
    stamp_lap_block(stamp_kind::open_export);
    if (threadIdx.x >= 32) return;
    bool last = false;
    if (threadIdx.x == 0) {
        fence_sys();
        last = fetch_inc_wrap_acq_rel_gpu(g.copies_done, num_blocks - 1) == uint32_t(num_blocks - 1);
        fence_sys();
        for (int to = 0; last && to < c.world; ++to) store_release_sys(c.rows_posted(to, c.rank), epoch);
    }
    if (!__shfl_sync(0xffffffff, int(last), 0)) return;
    await_rows(c, epoch);
    __syncwarp();
    stamp_lap_block(stamp_kind::open_rows);
}

}  // namespace moe_tk::nvlink
