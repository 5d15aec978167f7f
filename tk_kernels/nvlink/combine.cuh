// Combine and reduce roles: any warp that has nothing else to do. A job is the sum of one token's rows on this rank, sent to
// the token's source; there the planes of all contributing ranks are added in rank order. All sums are in fp32 and in a
// fixed order, so results are bitwise equal from run to run. Where there are few jobs, each is cut into slices of columns.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

using kittens::bf16;

struct combine_params {
    const int *counts, *slots, *job_order, *chunk_expected, *token_counts;
    const long long *contributors;
    uint32_t *l2_done, *job_done, *next_job, *next_token;
    const bf16 *expert_out;    // [slots, H]
    const float *slot_weight;  // [slots], or nullptr: applied before GEMM 2
    bf16 *out;                 // [num_tokens, H]
    int num_tokens, row_block, col_blocks;
};

__device__ __forceinline__ int take_item(uint32_t *dispenser) {
    int item = 0;
    if (kittens::laneid() == 0) item = int(fetch_add_relaxed_gpu(dispenser, 1u));
    return __shfl_sync(0xffffffff, item, 0);
}

// How many slices of columns make `items` jobs enough for all warps; a slice has at least SLICE_STEP columns.
constexpr int SLICE_STEP = 512, ENOUGH_ITEMS = 4096;
__device__ __forceinline__ int slices_of(int items, int width) {
    const int most = (width + SLICE_STEP - 1) / SLICE_STEP;
    return max(1, min(most, ENOUGH_ITEMS / max(items, 1)));
}
struct column_slice { int first, last; };
__device__ __forceinline__ column_slice slice_of(int index, int slices, int width) {
    const int steps = (width + SLICE_STEP - 1) / SLICE_STEP, first = index * steps / slices, last = (index + 1) * steps / slices;
    return {first * SLICE_STEP, min(width, last * SLICE_STEP)};
}

__device__ __forceinline__ void add_scaled(float (&sum)[8], const uint4 &v, float weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}
__device__ __forceinline__ uint4 to_bf16(const float (&sum)[8]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t *>(&pair);
    }
    return {words[0], words[1], words[2], words[3]};
}

// to[columns] = the sum of the lanes' rows (nullptr: none), times their weights, in the order of the lanes.
__device__ __forceinline__ void sum_rows(const bf16 *my_row, float my_weight, column_slice columns, bf16 *to) {
    constexpr int BATCH = 4, VECTORS = 2;  // rows and column steps whose loads are in flight together
    const int lane = kittens::laneid();
    const uint32_t present = __ballot_sync(0xffffffff, my_row != nullptr);
    for (int first = columns.first + lane * 8; first < columns.last + lane * 8; first += 256 * VECTORS) {
        float sum[VECTORS][8] = {};
        for (uint32_t left = present; left != 0;) {
            uint4 v[BATCH][VECTORS];
            float weight[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                weight[b] = 0;
#pragma unroll
                for (int u = 0; u < VECTORS; ++u) v[b][u] = {0, 0, 0, 0};
                if (left == 0) continue;
                const int from = __ffs(left) - 1;
                left &= left - 1;
                const bf16 *row = reinterpret_cast<const bf16 *>(__shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(my_row), from));
                weight[b] = __shfl_sync(0xffffffff, my_weight, from);
#pragma unroll
                for (int u = 0; u < VECTORS; ++u)
                    if (first + 256 * u < columns.last) v[b][u] = __ldcg(reinterpret_cast<const uint4 *>(row + first + 256 * u));
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int u = 0; u < VECTORS; ++u) add_scaled(sum[u], v[b][u], weight[b]);
        }
#pragma unroll
        for (int u = 0; u < VECTORS; ++u)
            if (first + 256 * u < columns.last) *reinterpret_cast<uint4 *>(to + first + 256 * u) = to_bf16(sum[u]);
    }
}

// One slice of one job; false on abort.
__device__ __forceinline__ bool combine_job(const call_view &c, const combine_params &p, int row, int slice, int slices, uint32_t epoch) {
    const int lane = kittens::laneid(), source = row / c.max_tokens, token = row % c.max_tokens, chunk = token / c.job_chunk;
    const int slot = lane < c.top_k ? __ldg(p.slots + int64_t(row) * c.top_k + lane) : -1;
    bool ok = true;
    float weight = 1.0f;
    if (slot >= 0) {
        const int block = slot / p.row_block;
        if (p.slot_weight) weight = __ldg(p.slot_weight + slot);
        ok = spin_until(p.l2_done + block, uint32_t(p.col_blocks), c, {phase_id::combine, role_id::combine, block, c.rank});
    }
    if (!__all_sync(0xffffffff, ok)) return false;
    stamp_lap_warp(stamp_kind::combine_wait, row);
    const bf16 *from = slot >= 0 ? p.expert_out + int64_t(slot) * c.hidden : nullptr;
    sum_rows(from, weight, slice_of(slice, slices, c.hidden), c.plane<bf16>(source, c.rank, token));
    // ORDER chunk_combined: the lanes' stores, fence.sys, the election's acq_rel, then the last one's st.release.sys;
    // reduce_token acquires.
    fence_sys();
    __syncwarp();
    if (lane == 0) {
        const int counter = source * c.job_chunks + chunk;
        const uint32_t done = fetch_add_acq_rel_gpu(p.job_done + counter, 1u) + 1;
        if (done == uint32_t(__ldg(p.chunk_expected + counter) * slices)) {
            fence_sys();
            store_release_sys(c.combined(source, c.rank, chunk), epoch);
        }
    }
    stamp_lap_warp(stamp_kind::combine, row);
    return true;
}

__device__ __forceinline__ void fill_nan(bf16 *to, column_slice columns) {
    for (int col = columns.first + kittens::laneid() * 8; col < columns.last; col += 256)
        *reinterpret_cast<uint4 *>(to + col) = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
}

// One slice of one own token: waits for the ranks that owe it a partial row. NaN on abort: nobody may take it for a result.
__device__ __forceinline__ void reduce_token(const call_view &c, const combine_params &p, int token, column_slice columns, uint32_t epoch) {
    const int lane = kittens::laneid(), chunk = token / c.job_chunk;
    const bool owes = lane < c.world && (uint64_t(__ldg(p.contributors + token)) >> lane & 1);
    bool ok = true;
    if (owes) ok = spin_until(c.combined(c.rank, lane, chunk), epoch, c, {phase_id::reduce, role_id::reduce, chunk, lane});
    bf16 *to = p.out + int64_t(token) * c.hidden;
    // A rank that gave up raised this flag before any later release of its own, so a wait that succeeded since sees it.
    ok = ok && load_relaxed_sys(&c.control(c.rank)->abort_flag) == 0;
    if (!__all_sync(0xffffffff, ok)) return fill_nan(to, columns);
    stamp_lap_warp(stamp_kind::reduce_wait, token);
    sum_rows(owes ? c.plane<bf16>(c.rank, lane, token) : nullptr, 1.0f, columns, to);
    stamp_lap_warp(stamp_kind::reduce, token);
}

// Jobs in the order in which they become ready, then this rank's own tokens. Dispensed, so that any number of warps helps.
__device__ __forceinline__ void combine_and_reduce(const call_view &c, const combine_params &p) {
    stamp_restart();
    const uint32_t epoch = *c.epoch_ptr;
    const int num_jobs = __ldg(p.counts + COUNT_JOBS), job_slices = slices_of(num_jobs, c.hidden);
    // A gather that gave up has left rows unwritten: nothing made of them may reach another rank.
    const bool given_up = load_relaxed_sys(&c.control(c.rank)->abort_flag) != 0;
    for (int item = take_item(p.next_job); !given_up && item < num_jobs * job_slices;) {
        const int row = __ldg(p.job_order + item / job_slices), slice = item % job_slices;
        item = take_item(p.next_job);
        if (!combine_job(c, p, row, slice, job_slices, epoch)) break;
    }
    const bool computed = !given_up && __ldg(p.token_counts + c.rank) == p.num_tokens;  // else some rank refused the call
    const int slices = slices_of(p.num_tokens, c.hidden);
    for (int item = take_item(p.next_token); item < p.num_tokens * slices;) {
        const int token = item / slices;
        const column_slice columns = slice_of(item % slices, slices, c.hidden);
        item = take_item(p.next_token);
        if (computed) reduce_token(c, p, token, columns, epoch);
        else fill_nan(p.out + int64_t(token) * c.hidden, columns);
    }
}

}  // namespace moe_tk::nvlink
