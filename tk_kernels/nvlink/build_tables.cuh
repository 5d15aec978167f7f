// The schedule tables, from the pairs of all ranks in this GPU's memory. One cluster builds; docs/schedule.md has the meaning.
#pragma once

#include "hooks.cuh"
#include "open_globals.cuh"

namespace moe_tk::nvlink {

struct token_place {
    int rank, t, segment;
    int64_t row;
};
__device__ __forceinline__ token_place place_of(const open_globals &g, const open_shared &s, int token) {
    int r = 0;
    while (token >= s.first_token[r + 1]) ++r;
    const int t = token - s.first_token[r], count = s.first_token[r + 1] - s.first_token[r];
    return {r, t, g.segments == 1 ? 0 : t * g.segments / count, int64_t(r) * g.call.max_tokens + t};
}
// Group of an id at this rank, or -1.
__device__ __forceinline__ int group_of(const open_globals &g, int id, int segment) {
    const int local = id - g.first_expert;
    return id >= 0 && local >= 0 && local < g.num_local ? segment * g.num_local + local : -1;
}
struct token_range { int first, last; };
__device__ __forceinline__ token_range tokens_of_warp(const open_globals &g, const open_shared &s, int warp) {
    const int all = s.first_token[g.call.world], each = (all + BUILD_WARPS - 1) / BUILD_WARPS;
    return {min(all, warp * each), min(all, (warp + 1) * each)};
}

// Calls body(token place, pair in the token's rank, pair is real, (id, weight)) for all pairs of this warp, 32 at a time in
// order; the loads of LOOKAHEAD steps are in flight together.
template <class Body>
__device__ __forceinline__ void for_each_pair(const open_globals &g, const build_place &me, const open_shared &s, uint32_t parity, Body &&body) {
    constexpr int LOOKAHEAD = 4;
    const int k = g.call.top_k;
    const token_range range = tokens_of_warp(g, s, me.global_warp);
    const int last = range.last * k;
    for (int first = range.first * k; first < last; first += 32 * LOOKAHEAD) {
        token_place at[LOOKAHEAD];
        int index[LOOKAHEAD];
        int2 pair[LOOKAHEAD];
#pragma unroll
        for (int u = 0; u < LOOKAHEAD; ++u) {
            const int p = first + u * 32 + me.lane;
            if (p >= last) continue;
            const int token = g.choices.divide(p);
            at[u] = place_of(g, s, token);
            index[u] = at[u].t * k + p - token * k;
            pair[u] = __ldcg(g.call.routing(g.call.rank, parity, at[u].rank) + index[u]);
        }
#pragma unroll
        for (int u = 0; u < LOOKAHEAD; ++u)
            if (first + u * 32 < last) body(at[u], index[u], first + u * 32 + me.lane < last, pair[u]);
    }
}

// Rows of each (warp, group), in the order of the pairs.
__device__ __forceinline__ void count_pairs(const open_globals &g, const build_place &me, open_shared &s, int groups, uint32_t parity) {
    for (int i = me.thread; i < OPEN_WARPS * groups; i += OPEN_THREADS) s.histogram[i] = 0;
    __syncthreads();
    uint32_t *mine = s.histogram + me.warp * groups;
    for_each_pair(g, me, s, parity, [&](const token_place &at, int, bool real, int2 pair) {
        const int group = real ? group_of(g, pair.x, at.segment) : -1;
        if (group >= 0) atomicAdd(mine + group, 1u);
    });
    __syncthreads();
}

// Exclusive sum over the block of one value per thread; `total` is the sum of all.
__device__ __forceinline__ int block_scan(int value, const build_place &me, int *warp_sum, int &total) {
    int sum = value;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(0xffffffff, sum, d);
        if (me.lane >= d) sum += below;
    }
    __syncthreads();
    if (me.lane == 31) warp_sum[me.warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < OPEN_WARPS; ++w) {
        if (w == me.warp) before = all;
        all += warp_sum[w];
    }
    total = all;
    return before + sum - value;
}

// Turns the counts of each (warp, group) into the slot of its first pair; fills offsets, groups and padding.
__device__ __forceinline__ void place_groups(const open_globals &g, const build_place &me, open_shared &s, int groups) {
    int *totals = g.scratch + OPEN_CLUSTER;  // [OPEN_CLUSTER, groups]
    for (int group = me.thread; group < groups; group += OPEN_THREADS) {
        uint32_t sum = 0;
        for (int w = 0; w < OPEN_WARPS; ++w) {
            const uint32_t here = s.histogram[w * groups + group];
            s.histogram[w * groups + group] = sum;
            sum += here;
        }
        totals[me.block * groups + group] = int(sum);
    }
    cluster_barrier();
    constexpr int PER_THREAD = (MAX_GROUPS + OPEN_THREADS - 1) / OPEN_THREADS;
    int before[PER_THREAD], padded[PER_THREAD], sum = 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int group = me.thread * PER_THREAD + i;
        before[i] = padded[i] = 0;
        if (group >= groups) continue;
        int all = 0;
        for (int b = 0; b < OPEN_CLUSTER; ++b) {
            if (b == me.block) before[i] = all;
            all += __ldcg(totals + b * groups + group);
        }
        s.total[group] = all;
        padded[i] = (all + g.row_block - 1) / g.row_block * g.row_block;
        sum += padded[i];
    }
    int all_slots;
    int at = block_scan(sum, me, s.warp_sum[0], all_slots);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int group = me.thread * PER_THREAD + i;
        if (group >= groups) continue;
        s.offset[group] = at;
        s.first_slot[group] = at + before[i];
        at += padded[i];
    }
    if (me.thread == 0) s.offset[groups] = all_slots;
    __syncthreads();
}

__device__ __forceinline__ void write_groups(const open_globals &g, const build_place &me, const open_shared &s, int groups) {
    const table_view &t = g.tables;
    for (int i = me.global_thread; i <= groups; i += BUILD_THREADS) t.expert_offsets[i] = s.offset[i];
    for (int e = me.global_thread; e < g.num_local; e += BUILD_THREADS) {
        int load = 0;
        for (int seg = 0; seg < g.segments; ++seg) load += s.total[seg * g.num_local + e];
        t.expert_load[e] = load;
        t.load_total[e] += load;
    }
    for (int group = me.global_warp; group < groups; group += BUILD_WARPS) {
        const int first = s.offset[group], rows = s.total[group], end = s.offset[group + 1];
        for (int slot = first + me.lane * g.row_block; slot < end; slot += 32 * g.row_block) {
            t.block_group[slot / g.row_block] = group;
            t.block_target[slot / g.row_block] = min(g.row_block, first + rows - slot);
        }
        for (int slot = first + rows + me.lane; slot < end; slot += 32) t.slot_pair[slot] = -1;
    }
    if (me.global_thread == 0) {
        const int blocks = s.offset[groups] / g.row_block;
        t.counts[COUNT_SLOTS] = s.offset[groups], t.counts[COUNT_BLOCKS] = blocks;
        t.counts[COUNT_TASKS1] = blocks * g.col_blocks1, t.counts[COUNT_TASKS2] = blocks * g.col_blocks2;
    }
}

// Pairs get their slots in order: 32 at a time, ranked among the lanes of the same group.
__device__ __forceinline__ void place_pairs(const open_globals &g, const build_place &me, open_shared &s, int groups, uint32_t parity) {
    uint32_t *before = s.histogram + me.warp * groups;
    for_each_pair(g, me, s, parity, [&](const token_place &at, int index, bool real, int2 pair) {
        const int group = real ? group_of(g, pair.x, at.segment) : -1;
        const uint32_t same = __match_any_sync(0xffffffff, group);
        const int rank = __popc(same & ((1u << me.lane) - 1));
        const int slot = group >= 0 ? s.first_slot[group] + int(before[group]) + rank : -1;
        __syncwarp();
        if (group >= 0 && rank == 0) before[group] += __popc(same);
        __syncwarp();
        if (!real) return;
        const int number = at.rank * g.call.max_tokens * g.call.top_k + index;
        g.tables.slots[number] = slot;
        if (slot >= 0) g.tables.slot_pair[slot] = number, g.tables.slot_weight[slot] = __int_as_float(pair.y);
    });
    __syncwarp();
}

enum slot_mark : uint8_t { MARK_FIRST = 1, MARK_LAST = 2 };  // smallest and largest slot of a row

// Calls body(j, slots[j]) for the slots of one row of the table, in vectors where k allows it.
template <class Body> __device__ __forceinline__ void for_each_slot(const int *slots, int k, Body &&body) {
    if (k % 4 == 0) {
#pragma unroll 2
        for (int j = 0; j < k; j += 4) {
            const int4 v = __ldcg(reinterpret_cast<const int4 *>(slots + j));
            body(j, v.x), body(j + 1, v.y), body(j + 2, v.z), body(j + 3, v.w);
        }
    } else {
#pragma unroll 6
        for (int j = 0; j < k; ++j) body(j, __ldcg(slots + j));
    }
}

// Per token: marks its smallest and largest slot, and counts its job.
__device__ __forceinline__ void mark_tokens(const open_globals &g, const build_place &me, const open_shared &s) {
    const call_view &c = g.call;
    const int k = c.top_k;
    const token_range range = tokens_of_warp(g, s, me.global_warp);
    for (int token = range.first + me.lane; token < range.last; token += 32) {
        const token_place at = place_of(g, s, token);
        int smallest = INT32_MAX, largest = -1;
        for_each_slot(g.tables.slots + at.row * k, k, [&](int, int slot) {
            if (slot >= 0) smallest = min(smallest, slot), largest = max(largest, slot);
        });
        if (largest >= 0) {  // zero_counters has cleared the marks of all other slots
            g.marks[smallest] = smallest == largest ? MARK_FIRST | MARK_LAST : MARK_FIRST;
            if (smallest != largest) g.marks[largest] = MARK_LAST;
            atomicAdd(g.tables.chunk_expected + at.rank * c.job_chunks + at.t / c.job_chunk, 1);
        }
    }
}

// task_order of one GEMM: `passes` over the columns, in each of them supertiles of 8 row blocks, column by column, every second
// column upwards. A pass is a whole number of runs of `per_step` column blocks. A warp per row block.
__device__ __forceinline__ void write_tasks(const open_globals &g, const build_place &me, const open_shared &s, int col_blocks, int passes,
                                            int per_step, int4 *tasks) {
    constexpr int SUPERTILE = 8;
    const int num_blocks = s.offset[g.segments * g.num_local] / g.row_block;
    for (int block = me.global_warp; block < num_blocks; block += BUILD_WARPS) {
        const int group = __ldcg(g.tables.block_group + block), segment = group / g.num_local;
        const int start = s.offset[group] / g.row_block, end = s.offset[group + 1] / g.row_block;
        const int seg_start = s.offset[segment * g.num_local] / g.row_block, seg_end = s.offset[(segment + 1) * g.num_local] / g.row_block;
        const int tile = start + (block - start) / SUPERTILE * SUPERTILE, height = min(SUPERTILE, end - tile), down = block - tile;
        const column_tiles tiles{{passes, (col_blocks + per_step - 1) / per_step}, col_blocks, per_step};
        for (int col = me.lane; col < col_blocks; col += 32) {
            const int pass = tiles.group_of(col), first = tiles.first(pass), in_pass = col - first;
            const int before = seg_start * col_blocks + (seg_end - seg_start) * first + (tile - seg_start) * int(tiles.size(pass));
            tasks[before + in_pass * height + (in_pass % 2 ? height - 1 - down : down)] = make_int4(segment, group % g.num_local, block, col);
        }
    }
}

// Compacts the marked slots into delivery_order (first slots) and job_order (last slots). Four slots per lane and step.
__device__ __forceinline__ void write_orders(const open_globals &g, const build_place &me, open_shared &s, int groups) {
    int *block_counts = g.scratch;  // [OPEN_CLUSTER, 2]
    const int num_slots = s.offset[groups], steps = (num_slots + 127) / 128, each = (steps + BUILD_WARPS - 1) / BUILD_WARPS;
    const int first = min(steps, me.global_warp * each), last = min(steps, first + each);
    const auto load = [&](int step) {
        const int slot = step * 128 + me.lane * 4;
        return slot < num_slots ? __ldcg(reinterpret_cast<const uint32_t *>(g.marks + slot)) : 0u;
    };
    int sums[2] = {0, 0};
#pragma unroll 4
    for (int step = first; step < last; ++step) {
        const uint32_t m = load(step);
        sums[0] += __popc(m & 0x01010101u), sums[1] += __popc(m & 0x02020202u);
    }
    int before[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        int total;
        before[w] = block_scan(sums[w], me, s.warp_sum[w], total);
        before[w] = __shfl_sync(0xffffffff, before[w], 0);  // of the warp
        if (me.thread == 0) block_counts[me.block * 2 + w] = total;
    }
    cluster_barrier();
    int all = 0;
    for (int b = 0; b < OPEN_CLUSTER; ++b) {
        if (b < me.block) before[0] += __ldcg(block_counts + b * 2), before[1] += __ldcg(block_counts + b * 2 + 1);
        all += __ldcg(block_counts + b * 2);
    }
    const auto pairs_of = [&](int step) {
        const int slot = step * 128 + me.lane * 4;
        return slot < num_slots ? __ldcg(reinterpret_cast<const int4 *>(g.tables.slot_pair + slot)) : int4{};
    };
    uint32_t next_m = first < last ? load(first) : 0;
    int4 next_pairs = first < last ? pairs_of(first) : int4{};
    for (int step = first; step < last; ++step) {
        const uint32_t m = next_m;
        const int pairs[4] = {next_pairs.x, next_pairs.y, next_pairs.z, next_pairs.w};
        if (step + 1 < last) next_m = load(step + 1), next_pairs = pairs_of(step + 1);
        const int mine = __popc(m & 0x01010101u) | __popc(m & 0x02020202u) << 16;
        int sum = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(0xffffffff, sum, d);
            if (me.lane >= d) sum += below;
        }
        int at0 = before[0] + ((sum - mine) & 0xffff), at1 = before[1] + ((sum - mine) >> 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t mark = m >> (8 * i) & 0xff;
            if (!mark) continue;
            const int row = g.choices.divide(pairs[i]);
            if (mark & MARK_FIRST) g.tables.delivery_order[at0++] = row;
            if (mark & MARK_LAST) g.tables.job_order[at1++] = row;
        }
        const int step_sum = __shfl_sync(0xffffffff, sum, 31);
        before[0] += step_sum & 0xffff, before[1] += step_sum >> 16;
    }
    if (me.global_thread == 0) g.tables.counts[COUNT_JOBS] = all;
}

}  // namespace moe_tk::nvlink
