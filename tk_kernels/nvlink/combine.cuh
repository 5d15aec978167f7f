// Combine and reduce roles: any warp that has nothing else to do. A job is the sum of one token's rows on this rank, sent to
// the token's source; there the planes of all contributing ranks are added in rank order. All sums are in fp32 and in a
// fixed order, so results are bitwise equal from run to run.
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

// The rows of one token, summed in the order of its choices, to `to`. Lanes hold the slots (-1: none) and their weights.
__device__ __forceinline__ void sum_rows(const combine_params &p, int width, int my_slot, float my_weight, bf16 *to) {
    constexpr int BATCH = 4;  // rows whose loads are in flight together
    const int lane = kittens::laneid();
    const uint32_t present = __ballot_sync(0xffffffff, my_slot >= 0);
    for (int first = 0; first < width; first += 32 * 8) {
        const int col = first + lane * 8;
        float sum[8] = {};
        for (uint32_t left = present; left != 0;) {
            uint4 v[BATCH];
            float weight[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                v[b] = {0, 0, 0, 0}, weight[b] = 0;
                const int from = left ? __ffs(left) - 1 : 0;
                const int slot = __shfl_sync(0xffffffff, my_slot, from);
                if (!left) continue;
                weight[b] = __shfl_sync(0xffffffff, my_weight, from);
                left &= left - 1;
                if (col < width) v[b] = __ldcg(reinterpret_cast<const uint4 *>(p.expert_out + int64_t(slot) * width + col));
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) add_scaled(sum, v[b], weight[b]);
        }
        if (col < width) *reinterpret_cast<uint4 *>(to + col) = to_bf16(sum);
    }
}

// One job; false on abort.
__device__ __forceinline__ bool combine_job(const call_view &c, const combine_params &p, int row, uint32_t epoch) {
    const int lane = kittens::laneid(), source = row / c.max_tokens, token = row % c.max_tokens, chunk = token / c.job_chunk;
    const int slot = lane < c.top_k ? __ldg(p.slots + int64_t(row) * c.top_k + lane) : -1;
    bool ok = true;
    float weight = 1.0f;
    if (slot >= 0) {
        const int block = slot / p.row_block;
        ok = spin_until(p.l2_done + block, uint32_t(p.col_blocks), c, {phase_id::combine, role_id::combine, block, c.rank});
        if (p.slot_weight) weight = __ldg(p.slot_weight + slot);
    }
    if (!__all_sync(0xffffffff, ok)) return false;
    sum_rows(p, c.hidden, slot, weight, c.plane<bf16>(source, c.rank, token));
    // ORDER chunk_combined: the lanes' stores, fence.sys, the election's acq_rel, then the last one's st.release.sys;
    // reduce_token acquires.
    fence_sys();
    __syncwarp();
    if (lane == 0) {
        const int counter = source * c.job_chunks + chunk;
        const uint32_t done = fetch_add_acq_rel_gpu(p.job_done + counter, 1u) + 1;
        if (done == uint32_t(__ldg(p.chunk_expected + counter))) {
            fence_sys();
            store_release_sys(c.combined(source, c.rank, chunk), epoch);
        }
    }
    return true;
}

// One own token: waits for the ranks that owe it a partial row. NaN on abort: nobody may take it for a result.
__device__ __forceinline__ bool reduce_token(const call_view &c, const combine_params &p, int token, uint32_t epoch) {
    const int lane = kittens::laneid();
    const uint64_t owing = uint64_t(__ldg(p.contributors + token));
    bool ok = true;
    for (int from = lane; from < c.world; from += 32)
        if (owing >> from & 1)
            ok &= spin_until(c.combined(c.rank, from, token / c.job_chunk), epoch, c,
                             {phase_id::reduce, role_id::reduce, token / c.job_chunk, from});
    ok = __all_sync(0xffffffff, ok);
    for (int col = lane * 8; col < c.hidden; col += 32 * 8) {
        float sum[8] = {};
        for (uint64_t left = owing; left != 0; left &= left - 1)
            add_scaled(sum, __ldcg(reinterpret_cast<const uint4 *>(c.plane<bf16>(c.rank, __ffsll(left) - 1, token) + col)), 1.0f);
        if (!ok) for (float &x : sum) x = __int_as_float(0x7fc00000);
        *reinterpret_cast<uint4 *>(p.out + int64_t(token) * c.hidden + col) = to_bf16(sum);
    }
    return ok;
}

// Jobs in the order in which they become ready, then this rank's own tokens. Dispensed, so that any number of warps helps.
__device__ __forceinline__ void combine_and_reduce(const call_view &c, const combine_params &p) {
    const uint32_t epoch = *c.epoch_ptr;
    const int num_jobs = __ldg(p.counts + COUNT_JOBS);
    int item = take_item(p.next_job);
    while (item < num_jobs) {
        const int row = __ldg(p.job_order + item);
        item = take_item(p.next_job);
        if (!combine_job(c, p, row, epoch)) break;
    }
    const bool computed = __ldg(p.token_counts + c.rank) == p.num_tokens;
    for (int token = take_item(p.next_token); token < p.num_tokens;) {
        const int next = take_item(p.next_token);
        if (computed) {
            reduce_token(c, p, token, epoch);
        } else {  // the call was refused by some rank
            const uint32_t nan2 = 0x7fff7fffu;
            for (int col = kittens::laneid() * 8; col < c.hidden; col += 32 * 8)
                *reinterpret_cast<uint4 *>(p.out + int64_t(token) * c.hidden + col) = {nan2, nan2, nan2, nan2};
        }
        token = next;
    }
}

}  // namespace moe_tk::nvlink
