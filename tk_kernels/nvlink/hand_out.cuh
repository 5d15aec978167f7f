// The last launch of dispatch_gemm: what open_call and gather_gemm have left becomes the caller's. Tables are copied, rows of no pair
// become zero, and all is NaN (slots: -1) if the call has not come to a result.
#pragma once

#include "dispatch_result.hpp"
#include "outcome.cuh"
#include "tables.cuh"

namespace moe_tk::nvlink {

constexpr uint32_t FOUR_NANS = 0x7f7f7f7fu;  // e4m3
constexpr int NAN_BITS = 0x7fffffff;         // fp32

struct hand_out_globals {
    call_view call;
    table_view tables;
    dispatch_result result;
    int num_offsets;
};

__device__ __forceinline__ void hand_out_tables(const hand_out_globals &g, bool good, int thread, int threads) {
    const call_view &c = g.call;
    const int per_rank = g.result.stride * c.top_k;
    for (int i = thread; i < c.world * per_rank; i += threads) {
        const int rank = i / per_rank, pair = i % per_rank;
        const bool real = good && pair / c.top_k < __ldcg(g.tables.token_counts + rank);
        g.result.slots[i] = real ? __ldcg(g.tables.slots + int64_t(rank) * c.max_tokens * c.top_k + pair) : -1;
    }
    for (int i = thread; i < g.num_offsets; i += threads) g.result.expert_offsets[i] = good ? __ldcg(g.tables.expert_offsets + i) : 0;
}

// Whether gather_gemm has left something in a row, which stays as it is.
__device__ __forceinline__ bool row_is_left(const hand_out_globals &g, bool good, int row, int used) {
    return good && row < used && __ldcg(g.tables.slot_pair + row) >= 0;
}

// A warp per row; then, in e4m3, a thread per scale: 1, as of all rows of zeros.
__device__ __forceinline__ void hand_out_all(const hand_out_globals &g, bool good, int thread, int threads) {
    hand_out_tables(g, good, thread, threads);
    const dispatch_result &to = g.result;
    const int used = __ldcg(g.tables.counts + COUNT_SLOTS);
    const uint32_t value = good ? 0 : to.scales ? FOUR_NANS : TWO_NANS;
    for (int row = thread / 32; row < to.rows; row += threads / 32) {
        if (row_is_left(g, good, row, used)) continue;
        uint4 *bytes = reinterpret_cast<uint4 *>(static_cast<char *>(to.activated) + int64_t(row) * to.row_bytes);
        for (int i = thread % 32; i < to.row_bytes / 16; i += 32) bytes[i] = {value, value, value, value};
    }
    if (to.scales == nullptr) return;
    const int64_t count = int64_t(to.row_bytes / 128) * to.rows;
    for (int64_t i = thread; i < count; i += threads)
        if (!row_is_left(g, good, int(i % to.rows), used)) to.scales[i] = good ? 1.0f : __int_as_float(NAN_BITS);
}

}  // namespace moe_tk::nvlink
