// Combine and reduce roles: any warp that has nothing else to do. A job is the sum of one token's rows on this rank, sent to
// the token's source; there the planes of all contributing ranks are added in rank order. All sums are in fp32 and in a
// fixed order, so results are bitwise equal from run to run. Where there are few jobs, each is cut into slices of columns.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "dispenser.cuh"
#include "hooks.cuh"
#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

using kittens::bf16;

struct combine_params {
    const int *counts, *slots, *job_order, *chunk_expected, *token_counts;
    const long long *contributors;
    uint32_t *l2_done, *job_done, *next_item;
    const bf16 *expert_out;    // [slots, H]
    const float *slot_weight;  // [slots], or nullptr: applied before GEMM 2
    bf16 *out;                 // [num_tokens, H]
    int num_tokens, row_block;
    column_tiles tiles;        // of GEMM 2
};

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

// A lane's part of a sum: a row and its weight; the last lane of a sum has its destination. All nullptr: not part of any.
struct summand {
    const bf16 *row;
    float weight;
    bf16 *to;
};

// Every sum of the lanes' rows times their weights, in the order of the lanes, for one slice of columns. A sum without rows is
// zero. BATCH: as many as the registers of the warp allow.
template <int BATCH> __device__ __forceinline__ void sum_rows(const summand &mine, column_slice columns) {
    constexpr int VECTORS = 2;  // BATCH rows and two column steps have their loads in flight together
    using address = unsigned long long;
    const uint32_t present = __ballot_sync(0xffffffff, mine.row != nullptr || mine.to != nullptr);
    for (int first = columns.first + kittens::laneid() * 8; first < columns.last + kittens::laneid() * 8; first += 256 * VECTORS) {
        float sum[VECTORS][8] = {};
        for (uint32_t left = present; left != 0;) {
            uint4 v[BATCH][VECTORS];
            uint32_t rest = left;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
#pragma unroll
                for (int u = 0; u < VECTORS; ++u) v[b][u] = {0, 0, 0, 0};
                if (rest == 0) continue;
                const bf16 *row = reinterpret_cast<const bf16 *>(__shfl_sync(0xffffffff, reinterpret_cast<address>(mine.row), __ffs(rest) - 1));
                rest &= rest - 1;
                if (row == nullptr) continue;
#pragma unroll
                for (int u = 0; u < VECTORS; ++u)
                    if (first + 256 * u < columns.last) v[b][u] = __ldcg(reinterpret_cast<const uint4 *>(row + first + 256 * u));
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (left == 0) break;
                const int from = __ffs(left) - 1;
                left &= left - 1;
                const float weight = __shfl_sync(0xffffffff, mine.weight, from);
                bf16 *to = reinterpret_cast<bf16 *>(__shfl_sync(0xffffffff, reinterpret_cast<address>(mine.to), from));
#pragma unroll
                for (int u = 0; u < VECTORS; ++u) add_scaled(sum[u], v[b][u], weight);
                if (to == nullptr) continue;
#pragma unroll
                for (int u = 0; u < VECTORS; ++u) {
                    if (first + 256 * u < columns.last) *reinterpret_cast<uint4 *>(to + first + 256 * u) = to_bf16(sum[u]);
#pragma unroll
                    for (int i = 0; i < 8; ++i) sum[u][i] = 0;
                }
            }
        }
    }
}

// A batch of jobs, one lane for each (job, choice): waits for the column group of all their row blocks. False on abort.
template <int BATCH, bool TILES_COUNTED>
__device__ __forceinline__ bool combine_jobs(const call_view &c, const combine_params &p, const work_cut &cut, int num_jobs, int group,
                                             int item, uint32_t epoch) {
    const int lane = kittens::laneid(), k = c.top_k, batch = item / cut.slices, first = batch * cut.batch;
    const int jobs = min(cut.batch, num_jobs - first), job = lane / k, choice = lane % k;
    int row = 0, slot = -1;
    if (job < jobs) {
        row = __ldg(p.job_order + first + job);
        slot = __ldg(p.slots + int64_t(row) * k + choice);
    }
    bool ok = true;
    summand mine{nullptr, 1.0f, nullptr};
    const int source = row / c.max_tokens, token = row % c.max_tokens, chunk = token / c.job_chunk;
    if (slot >= 0) {
        const int block = slot / p.row_block;
        if (p.slot_weight) mine.weight = __ldg(p.slot_weight + slot);
        mine.row = p.expert_out + int64_t(slot) * c.hidden;
        if constexpr (TILES_COUNTED)
            ok = spin_until(p.l2_done + block * MAX_COL_GROUPS + group, p.tiles.size(group), c,
                            {phase_id::combine, role_id::combine, block, c.rank});
    }
    if (!__all_sync(0xffffffff, ok)) return false;
    __syncwarp();  // what each lane has acquired holds for all lanes: a vote alone orders no memory
    stamp_lap_warp(stamp_kind::combine_wait, stamp_batch(group, first));
    if (job < jobs && choice == k - 1) mine.to = c.plane<bf16>(source, c.rank, token);
    sum_rows<BATCH>(mine, slice_of(p.tiles.columns, c.hidden, group, item % cut.slices, cut.slices));
    // ORDER chunk_combined: the lanes' stores, fence.sys, the election's acq_rel, then the last one's st.release.sys;
    // reduce_tokens acquires.
    fence_sys();
    __syncwarp();
    if (mine.to != nullptr) {
        const int counter = source * c.job_chunks + chunk;
        const uint32_t done = fetch_add_acq_rel_gpu(p.job_done + counter * MAX_COL_GROUPS + group, 1u) + 1;
        if (done == uint32_t(__ldg(p.chunk_expected + counter) * cut.slices)) {
            fence_sys();
            store_release_sys(c.combined(source, c.rank, chunk, group), epoch);
        }
    }
    stamp_lap_warp(stamp_kind::combine, stamp_batch(group, first));
    return true;
}

__device__ __forceinline__ void fill_nan(bf16 *to, column_slice columns) {
    for (int col = columns.first + kittens::laneid() * 8; col < columns.last; col += 256)
        *reinterpret_cast<uint4 *>(to + col) = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
}

// A batch of own tokens, one lane for each (token, rank): waits for the ranks that owe them a partial row. NaN on abort, and
// where the call was not computed: nobody may take it for a result.
template <int BATCH>
__device__ __forceinline__ void reduce_tokens(const call_view &c, const combine_params &p, const work_cut &cut, int group, int item,
                                              bool computed, uint32_t epoch) {
    const int lane = kittens::laneid(), batch = item / cut.slices, first = batch * cut.batch;
    const int tokens = min(cut.batch, p.num_tokens - first), token = first + lane / c.world, from = lane % c.world;
    const column_slice columns = slice_of(p.tiles.columns, c.hidden, group, item % cut.slices, cut.slices);
    const bool real = lane / c.world < tokens;
    bool ok = computed;
    summand mine{nullptr, 1.0f, nullptr};
    if (real && computed && (uint64_t(__ldg(p.contributors + token)) >> from & 1)) {
        const int chunk = token / c.job_chunk;
        ok = spin_until(c.combined(c.rank, from, chunk, group), epoch, c, {phase_id::reduce, role_id::reduce, chunk, from});
        mine.row = c.plane<bf16>(c.rank, from, token);
    }
    // A rank that gave up raised this flag before any later release of its own, so a wait that succeeded since sees it.
    ok = ok && load_relaxed_sys(&c.control(c.rank)->abort_flag) == 0;
    if (!__all_sync(0xffffffff, ok)) {
        for (int t = 0; t < tokens; ++t) fill_nan(p.out + int64_t(first + t) * c.hidden, columns);
        if (computed) report_told(c);
        return;
    }
    __syncwarp();  // as above
    stamp_lap_warp(stamp_kind::reduce_wait, stamp_batch(group, first));
    if (real && from == c.world - 1) mine.to = p.out + int64_t(token) * c.hidden;
    sum_rows<BATCH>(mine, columns);
    stamp_lap_warp(stamp_kind::reduce, stamp_batch(group, first));
}

// TILES_COUNTED: GEMM 2 runs beside and counts its tiles; else it is over.
template <int BATCH, bool TILES_COUNTED = true> __device__ __forceinline__ void combine_and_reduce(const call_view &c, const combine_params &p) {
    const uint32_t epoch = *c.epoch_ptr;
    const int groups = p.tiles.columns.groups, num_jobs = __ldg(p.counts + COUNT_JOBS), width = (c.hidden + groups - 1) / groups;
    const work_cut jobs = cut_work(num_jobs, groups, width, min(4, 32 / c.top_k));
    const work_cut tokens = cut_work(p.num_tokens, groups, width, min(8, 32 / c.world));
    const work_list list{groups, jobs.items(), tokens.items()};
    // A gather that gave up has left rows unwritten: nothing made of them may reach another rank.
    bool given_up = load_relaxed_sys(&c.control(c.rank)->abort_flag) != 0;
    const bool computed = !given_up && __ldg(p.token_counts + c.rank) == p.num_tokens;  // else some rank refused the call
    // An item is taken when the one before is done, not sooner: GEMM 2 makes most jobs ready at once, and a warp that held two would
    // leave another one without.
    for (int item = take_item(p.next_item); item < list.size(); item = take_item(p.next_item)) {
        const work_list::place at = list.at(item);
        if (!at.is_job) reduce_tokens<BATCH>(c, p, tokens, at.group, at.index, computed, epoch);
        else if (!given_up) given_up = !combine_jobs<BATCH, TILES_COUNTED>(c, p, jobs, num_jobs, at.group, at.index, epoch);
    }
    if (given_up) report_told(c);
}

}  // namespace moe_tk::nvlink
