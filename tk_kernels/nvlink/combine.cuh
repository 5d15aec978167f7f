// Combine and reduce roles: any warp that has nothing else to do. A job is the sum of one token's rows on this rank, sent to
// the token's source; there the planes of all contributing ranks are added in rank order. All sums are in fp32 and in a
// fixed order, so results are bitwise equal from run to run. Where there are few jobs, each is cut into slices of columns.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "hooks.cuh"
#include "pull_rows.cuh"
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

// A lane's part of a batch of jobs: one choice of one job. What it is follows from two reads, one behind the other.
struct job_part {
    int row = -1;   // of job_order; -1: no part
    int slot = -1;  // -1: not on this rank
};

// Jobs whose sums a warp has stored and told nobody of: the stores land while it begins its next batch.
struct untold_jobs {
    int counter = -1;  // of this lane's job, or -1
    int group = 0;
};

__device__ __forceinline__ void fill_nan(bf16 *to, column_slice columns) {
    for (int col = columns.first + kittens::laneid() * 8; col < columns.last; col += 256)
        *reinterpret_cast<uint4 *>(to + col) = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
}

// What one warp does: takes items until there are none. BATCH: as many rows in flight as its registers allow. TILES_COUNTED: GEMM 2
// runs beside and counts its tiles; else it is over.
template <int BATCH, bool TILES_COUNTED> class combiner {
  public:
    __device__ combiner(const call_view &c, const combine_params &p)
        : c_(c), p_(p), lane_(kittens::laneid()), num_jobs_(__ldg(p.counts + COUNT_JOBS)), epoch_(*c.epoch_ptr) {
        const int groups = p.tiles.columns.groups, width = (c.hidden + groups - 1) / groups;
        jobs_ = cut_work(num_jobs_, groups, width, min(4, 32 / c.top_k));
        tokens_ = cut_work(p.num_tokens, groups, width, min(8, 32 / c.world));
    }

    // Where there are many items the next one is taken, and what it is made of read, while the one at hand waits. Where there are
    // few each warp should have one, and nobody should hold one while it waits for another rank.
    __device__ void run() {
        // A gather that gave up has left rows unwritten: nothing made of them may reach another rank.
        bool given_up = load_relaxed_sys(&c_.control(c_.rank)->abort_flag) != 0;
        const bool computed = !given_up && __ldg(p_.token_counts + c_.rank) == p_.num_tokens;  // else some rank refused the call
        const work_list list{p_.tiles.columns.groups, jobs_.items(), tokens_.items()};
        const bool many = list.size() > ENOUGH_ITEMS;
        int item = take_item(p_.next_item);
        job_part part;
        bool part_known = false;
        while (item < list.size()) {
            const work_list::place at = list.at(item);
            if (!at.is_job || given_up) {
                tell();
                if (!at.is_job) reduce_tokens(at, computed);
                item = take_item(p_.next_item), part_known = false;
                continue;
            }
            if (!part_known) part.row = row_of(at), part.slot = slot_of(part.row);
            job_part next;
            if (many) {
                const uint32_t ticket = lane_ == 0 ? fetch_add_relaxed_gpu(p_.next_item, 1u) : 0u;
                given_up = !wait_for_tiles(at, part);
                item = int(__shfl_sync(0xffffffff, ticket, 0));
                const work_list::place behind = list.at(min(item, list.size() - 1));
                part_known = item < list.size() && behind.is_job;
                if (part_known) next.row = row_of(behind);
                tell();
                if (part_known) next.slot = slot_of(next.row);
            } else {
                given_up = !wait_for_tiles(at, part);
            }
            if (!given_up) add_jobs(at, part);
            part = next;
            if (many) continue;
            tell();
            item = take_item(p_.next_item), part_known = false;
        }
        tell();
        if (given_up) report_told(c_);
    }

  private:
    __device__ int first_job(const work_list::place &at) const { return at.index / jobs_.slices * jobs_.batch; }
    // This lane's job of the batch, -1 where it has none.
    __device__ int row_of(const work_list::place &at) const {
        const int first = first_job(at), jobs = min(jobs_.batch, num_jobs_ - first), job = lane_ / c_.top_k;
        return job < jobs ? __ldg(p_.job_order + first + job) : -1;
    }
    __device__ int slot_of(int row) const { return row < 0 ? -1 : __ldg(p_.slots + int64_t(row) * c_.top_k + lane_ % c_.top_k); }

    // For the column group of all row blocks of a batch. False on abort.
    __device__ bool wait_for_tiles(const work_list::place &at, const job_part &part) {
        if constexpr (TILES_COUNTED) {
            const int block = part.slot / p_.row_block;
            const uint32_t *done = p_.l2_done + block * MAX_COL_GROUPS + at.group;
            const uint32_t want = p_.tiles.size(at.group);
            bool ok = part.slot < 0 || protocol::reached(kittens::load_acquire_gpu(done), want);
            if (!__all_sync(0xffffffff, ok)) {
                tell();  // nobody waits for what this warp has finished
                if (!ok) ok = spin_until(done, want, c_, {phase_id::combine, role_id::combine, block, c_.rank});
                if (!__all_sync(0xffffffff, ok)) return false;
            }
            __syncwarp();  // what each lane has acquired holds for all lanes: a vote alone orders no memory
        }
        stamp_lap_warp(stamp_kind::combine_wait, stamp_batch(at.group, first_job(at)));
        return true;
    }

    // The sums of a batch, one lane for each (job, choice).
    __device__ void add_jobs(const work_list::place &at, const job_part &part) {
        summand mine{nullptr, 1.0f, nullptr};
        if (part.slot >= 0) {
            if (p_.slot_weight) mine.weight = __ldg(p_.slot_weight + part.slot);
            mine.row = p_.expert_out + int64_t(part.slot) * c_.hidden;
        }
        const int source = part.row / c_.max_tokens, token = part.row % c_.max_tokens;
        const bool last = part.row >= 0 && lane_ % c_.top_k == c_.top_k - 1;
        if (last) mine.to = c_.plane<bf16>(source, c_.rank, token);
        sum_rows<BATCH>(mine, slice_of(p_.tiles.columns, c_.hidden, at.group, at.index % jobs_.slices, jobs_.slices));
        untold_.counter = last ? source * c_.job_chunks + token / c_.job_chunk : -1;
        untold_.group = at.group;
        stamp_lap_warp(stamp_kind::combine, stamp_batch(at.group, first_job(at)));
    }

    // ORDER chunk_combined: the lanes' stores, fence.sys, the election's acq_rel, then the last one's st.release.sys;
    // reduce_tokens acquires.
    __device__ void tell() {
        if (__ballot_sync(0xffffffff, untold_.counter >= 0) == 0) return;
        fence_sys();
        __syncwarp();
        if (untold_.counter >= 0) {
            const int counter = untold_.counter;
            const uint32_t done = fetch_add_acq_rel_gpu(p_.job_done + counter * MAX_COL_GROUPS + untold_.group, 1u) + 1;
            if (done == uint32_t(__ldg(p_.chunk_expected + counter) * jobs_.slices)) {
                fence_sys();
                store_release_sys(c_.combined(counter / c_.job_chunks, c_.rank, counter % c_.job_chunks, untold_.group), epoch_);
            }
        }
        untold_.counter = -1;
    }

    // A batch of own tokens, one lane for each (token, rank): waits for the ranks that owe them a partial row. NaN on abort, and
    // where the call was not computed: nobody may take it for a result.
    __device__ void reduce_tokens(const work_list::place &at, bool computed) {
        const int first = at.index / tokens_.slices * tokens_.batch;
        const int tokens = min(tokens_.batch, p_.num_tokens - first), token = first + lane_ / c_.world, from = lane_ % c_.world;
        const column_slice columns = slice_of(p_.tiles.columns, c_.hidden, at.group, at.index % tokens_.slices, tokens_.slices);
        const bool real = lane_ / c_.world < tokens;
        bool ok = computed;
        summand mine{nullptr, 1.0f, nullptr};
        if (real && computed && (uint64_t(__ldg(p_.contributors + token)) >> from & 1)) {
            const int chunk = token / c_.job_chunk;
            ok = spin_until(c_.combined(c_.rank, from, chunk, at.group), epoch_, c_, {phase_id::reduce, role_id::reduce, chunk, from});
            mine.row = c_.plane<bf16>(c_.rank, from, token);
        }
        // A rank that gave up raised this flag before any later release of its own, so a wait that succeeded since sees it.
        ok = ok && load_relaxed_sys(&c_.control(c_.rank)->abort_flag) == 0;
        if (!__all_sync(0xffffffff, ok)) {
            for (int t = 0; t < tokens; ++t) fill_nan(p_.out + int64_t(first + t) * c_.hidden, columns);
            if (computed) report_told(c_);
            return;
        }
        __syncwarp();  // as above
        stamp_lap_warp(stamp_kind::reduce_wait, stamp_batch(at.group, first));
        if (real && from == c_.world - 1) mine.to = p_.out + int64_t(token) * c_.hidden;
        sum_rows<BATCH>(mine, columns);
        stamp_lap_warp(stamp_kind::reduce, stamp_batch(at.group, first));
    }

    const call_view &c_;
    const combine_params &p_;
    const int lane_, num_jobs_;
    const uint32_t epoch_;
    work_cut jobs_, tokens_;
    untold_jobs untold_;
};

template <int BATCH, bool TILES_COUNTED = true> __device__ __forceinline__ void combine_and_reduce(const call_view &c, const combine_params &p) {
    combiner<BATCH, TILES_COUNTED>(c, p).run();
}

}  // namespace moe_tk::nvlink
