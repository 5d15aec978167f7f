// The schedule tables, from the pairs of all ranks in this GPU's memory; docs/schedule.md has the meaning.
//
// Both orders are counting sorts of pairs by group, stable in (token, choice): the slots of all pairs, and job_order of each
// token's last one, in the order of slots. Which pair of a token that is follows from its groups alone, so both are counted in
// one pass, and one sum over warps, blocks and groups places both. The schedule's delivery_order is not built: GEMM 1 gathers.
#pragma once

#include "hooks.cuh"
#include "open_globals.cuh"

namespace moe_tk::nvlink {

// Two numbers of one group: its pairs, and those among them that are the last of their token in slot order.
struct group_counts {
    int pairs, lasts;
    __device__ static uint64_t pack(int pairs, int lasts) { return uint64_t(uint32_t(pairs)) | uint64_t(uint32_t(lasts)) << 32; }
    __device__ static group_counts unpack(uint64_t v) { return {int(v), int(v >> 32)}; }
};
static_assert(MAX_TOKENS * 32ll < 1ll << 31, "pairs of all ranks are counted in 32 bits");

// chunk_expected is added to by place_pairs, behind barriers 1 to 3.
__device__ __forceinline__ void zero_chunks(const open_globals &g, const build_place &me) {
    if (me.block != 0) return;
#pragma unroll 1
    for (int i = me.thread; i < g.call.world * g.call.job_chunks; i += OPEN_THREADS) g.tables.chunk_expected[i] = 0;
}

struct token_place { int rank, t, segment; };
__device__ __forceinline__ token_place place_of(const open_globals &g, const open_shared &s, int token) {
    int r = 0;
    while (token >= s.first_token[r + 1]) ++r;
    const int t = token - s.first_token[r], count = s.first_token[r + 1] - s.first_token[r];
    return {r, t, g.segments == 1 ? 0 : int(uint32_t(t) * uint32_t(g.segments) / uint32_t(count))};
}
// Group of an id at this rank, or -1.
__device__ __forceinline__ int group_of(const open_globals &g, int id, int segment) {
    const int local = id - g.first_expert;
    return id >= 0 && local >= 0 && local < g.num_local ? segment * g.num_local + local : -1;
}

// The tokens of a warp. It takes them in steps of 32 / k whole ones, a lane for each pair.
struct token_walk {
    int first, last, per_step;
    int token, choice;  // of this lane, in a step
    bool used;          // whether there is one
};
__device__ __forceinline__ token_walk walk_of(const open_globals &g, const build_place &me, const open_shared &s) {
    const int warps = me.builders * g.room.warps, warp = me.block * g.room.warps + me.warp;
    const int all = s.first_token[g.call.world], each = (all + warps - 1) / warps;
    token_walk w;
    w.first = me.warp < g.room.warps ? min(all, warp * each) : all, w.last = min(all, w.first + each);
    w.per_step = g.choices.divide(32), w.token = g.choices.divide(me.lane);
    w.choice = me.lane - w.token * g.call.top_k, w.used = w.token < w.per_step;
    return w;
}

// The key of a pair: its group, and whether it is the last of its token's pairs; or -1.
constexpr int KEY_LAST = 1 << 30, KEY_GROUP = KEY_LAST - 1;

// Slots of a token follow its pairs' (group, choice), since a token is in one segment and earlier than the next one.
__device__ __forceinline__ int key_of(const open_globals &g, const build_place &me, const token_walk &w, int group) {
    const int k = g.call.top_k, mine = group * 32 + w.choice;
    int most = group >= 0 ? mine : -1;
#pragma unroll 1
    for (int d = 1; d < k; d *= 2) {  // of the 2 d pairs from this one on
        const int other = __shfl_sync(0xffffffff, most, me.lane + d);
        if (w.choice + d < k) most = max(most, other);
    }
    most = __shfl_sync(0xffffffff, most, me.lane - w.choice);
    return group < 0 ? -1 : group | (mine == most ? KEY_LAST : 0);
}

// Fills the lane's column of the stash with (key, weight) of its pairs of tokens first .. last. The loads of LOOKAHEAD steps are in
// flight together.
__device__ __forceinline__ void load_chunk(const open_globals &g, const build_place &me, const open_shared &s, const token_walk &w,
                                           uint32_t parity, int first, int last, int2 *stash) {
    constexpr int LOOKAHEAD = 4;
    const int stride = LOOKAHEAD * w.per_step;
#pragma unroll 1
    for (int from = first, step = 0; from < last; from += stride, step += LOOKAHEAD) {
        int2 pair[LOOKAHEAD];
        int segment[LOOKAHEAD];
#pragma unroll
        for (int u = 0; u < LOOKAHEAD; ++u) {
            const int token = from + u * w.per_step + w.token;
            pair[u] = {-1, 0}, segment[u] = 0;
            if (!w.used || token >= last) continue;
            const token_place at = place_of(g, s, token);
            segment[u] = at.segment;
            pair[u] = __ldcg(g.call.routing(g.call.rank, parity, at.rank) + at.t * g.call.top_k + w.choice);
        }
#pragma unroll
        for (int u = 0; u < LOOKAHEAD; ++u)
            if (from + u * w.per_step < last) stash[(step + u) * 32] = {group_of(g, pair[u].x, segment[u]), pair[u].y};
    }
#pragma unroll 1
    for (int from = first, step = 0; from < last; from += w.per_step, ++step) stash[step * 32].x = key_of(g, me, w, stash[step * 32].x);
}

// Calls body(first token of the step, (key, weight) of this lane's pair) for all steps of this warp in order. What does not fit
// the stash at once is loaded again by the second pass over it.
template <class Body>
__device__ __forceinline__ void for_each_step(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a,
                                              const token_walk &w, uint32_t parity, bool loaded, Body &&body) {
    const int chunk = g.room.steps * w.per_step;
    int2 *stash = a.stash + me.warp * g.room.steps * 32 + me.lane;
    if (w.last - w.first > chunk) loaded = false;
#pragma unroll 1
    for (int first = w.first; first < w.last; first += chunk) {
        const int last = min(w.last, first + chunk);
        if (!loaded) load_chunk(g, me, s, w, parity, first, last, stash);
#pragma unroll 1
        for (int from = first, step = 0; from < last; from += w.per_step, ++step) body(from, stash[step * 32]);
    }
}

// Counts the pairs of a step in the warp's histogram; returns what it held before each pair.
__device__ __forceinline__ uint64_t count_step(uint64_t *mine, int key, int lane) {
    const int group = key < 0 ? -1 : key & KEY_GROUP;
    const uint32_t same = __match_any_sync(0xffffffff, group), before = same & ((1u << lane) - 1);
    const uint32_t lasts = __ballot_sync(0xffffffff, key >= 0 && key & KEY_LAST);
    const uint64_t old = group >= 0 ? mine[group] : 0;
    __syncwarp();
    if (group >= 0 && before == 0) mine[group] = old + group_counts::pack(__popc(same), __popc(same & lasts));
    __syncwarp();
    return old + group_counts::pack(__popc(before), __popc(before & lasts));
}

__device__ __forceinline__ void count_pairs(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a,
                                            const token_walk &w, uint32_t parity) {
    const int groups = g.segments * g.num_local;
    uint64_t *mine = a.histogram + me.warp * groups;
    if (me.warp < g.room.warps)
#pragma unroll 1
        for (int i = me.lane; i < groups; i += 32) mine[i] = 0;
    __syncwarp();
    for_each_step(g, me, s, a, w, parity, false, [&](int, int2 pair) { count_step(mine, pair.x, me.lane); });
    __syncthreads();
}

// Turns the counts of each (warp, group) into those of the warps before it, and gives their sums to all blocks that build.
__device__ __forceinline__ void share_counts(const open_globals &g, const build_place &me, const build_arrays &a) {
    constexpr int BATCH = 4;  // room_for gives a multiple of it
    const int groups = g.segments * g.num_local;
#pragma unroll 1
    for (int group = me.thread; group < groups; group += OPEN_THREADS) {
        uint64_t sum = 0;
#pragma unroll 1
        for (int warp = 0; warp < g.room.warps; warp += BATCH) {
            uint64_t *row = a.histogram + warp * groups + group, here[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) here[u] = row[u * groups];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) row[u * groups] = sum, sum += here[u];
        }
        for (int block = 0; block < me.builders; ++block) in_block(a.inbox, block)[me.block * groups + group] = sum;
    }
    // 3 of 3: releases the warps that have written, acquires their sums. Behind it no block touches another one's memory, so each
    // may leave when it likes.
    if (me.builders == 1) __syncthreads();
    else cluster_barrier(me.warp * 32 < groups);
}

// Exclusive sums over the block of two values per thread; `total` are the sums of all. Once only.
__device__ __forceinline__ void block_scan(int (&value)[2], const build_place &me, open_shared &s, int (&total)[2]) {
    const auto warp_scan = [&](int v) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(0xffffffff, v, d);
            if (me.lane >= d) v += below;
        }
        return v;
    };
    int sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] = warp_scan(value[i]);
        if (me.lane == 31) s.warp_sum[i][me.warp] = sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int mine = me.lane < OPEN_WARPS ? s.warp_sum[i][me.lane] : 0, warps = warp_scan(mine);
        total[i] = __shfl_sync(0xffffffff, warps, 31);
        value[i] = __shfl_sync(0xffffffff, warps - mine, me.warp) + sum[i] - value[i];
    }
}

// Fills what a block knows of each group.
__device__ __forceinline__ void place_groups(const open_globals &g, const build_place &me, open_shared &s, const build_arrays &a) {
    constexpr int PER_THREAD = (MAX_GROUPS + OPEN_THREADS - 1) / OPEN_THREADS;
    const int groups = g.segments * g.num_local;
    const int each = groups <= OPEN_THREADS ? 1 : PER_THREAD;
    group_counts before[PER_THREAD];
    int padded[PER_THREAD], lasts[PER_THREAD], at[2] = {0, 0}, total[2];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int group = me.thread * each + i;
        before[i] = {0, 0}, padded[i] = lasts[i] = 0;
        if (i >= each || group >= groups) continue;
        int pairs = 0;
#pragma unroll 4
        for (int block = 0; block < OPEN_CLUSTER; ++block) {  // loads in flight together
            if (block >= me.builders) continue;
            if (block == me.block) before[i] = {pairs, lasts[i]};
            const group_counts here = group_counts::unpack(a.inbox[block * groups + group]);
            pairs += here.pairs, lasts[i] += here.lasts;
        }
        a.total[group] = pairs;
        padded[i] = (pairs + g.row_block - 1) & -g.row_block;
        at[0] += padded[i], at[1] += lasts[i];
    }
    block_scan(at, me, s, total);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int group = me.thread * each + i;
        if (i >= each || group >= groups) continue;
        a.offset[group] = at[0];
        a.first_slot[group] = at[0] + before[i].pairs;
        a.first_job[group] = at[1] + before[i].lasts;
        at[0] += padded[i], at[1] += lasts[i];
    }
    if (me.thread == 0) {
        a.offset[groups] = total[0];
        if (me.block == 0) g.tables.counts[COUNT_JOBS] = total[1];
    }
    __syncthreads();
}

// Each pair's slot, and the job of its token where it is the last one.
__device__ __forceinline__ void place_pairs(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a,
                                            const token_walk &w, uint32_t parity) {
    const call_view &c = g.call;
    const table_view &t = g.tables;
    uint64_t *mine = a.histogram + me.warp * g.segments * g.num_local;
    for_each_step(g, me, s, a, w, parity, true, [&](int from, int2 pair) {
        const int key = pair.x, group = key & KEY_GROUP, token = from + w.token;
        const group_counts before = group_counts::unpack(count_step(mine, key, me.lane));
        if (!w.used || token >= w.last) return;
        const token_place at = place_of(g, s, token);
        const int row = at.rank * c.max_tokens + at.t, number = row * c.top_k + w.choice;
        const int slot = key < 0 ? -1 : a.first_slot[group] + before.pairs;
        t.slots[number] = slot;
        if (key < 0) return;
        t.slot_pair[slot] = number, t.slot_weight[slot] = __int_as_float(pair.y);
        if (key & KEY_LAST) {
            t.job_order[a.first_job[group] + before.lasts] = row;
            atomicAdd(t.chunk_expected + at.rank * c.job_chunks + at.t / c.job_chunk, 1);
        }
    });
}

// Row blocks of so many slots. A row block is a power of two.
__device__ __forceinline__ int blocks_of(const open_globals &g, int slots) { return slots >> (__ffs(g.row_block) - 1); }

__device__ __forceinline__ void write_groups(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a) {
    const table_view &t = g.tables;
    const int groups = g.segments * g.num_local, threads = me.builders * OPEN_THREADS, thread = me.thread * me.builders + me.block;
    for (int r = thread; r < g.call.world; r += threads) t.token_counts[r] = s.first_token[r + 1] - s.first_token[r];
#pragma unroll 1
    for (int i = thread; i <= groups; i += threads) t.expert_offsets[i] = a.offset[i];
#pragma unroll 1
    for (int e = thread; e < g.num_local; e += threads) {
        int load = 0;
#pragma unroll 1
        for (int seg = 0; seg < g.segments; ++seg) load += a.total[seg * g.num_local + e];
        t.expert_load[e] = load;
        atomicAdd(reinterpret_cast<unsigned long long *>(t.load_total) + e, static_cast<unsigned long long>(load));
    }
    if (thread == 0) {
        const int blocks = blocks_of(g, a.offset[groups]);
        t.counts[COUNT_SLOTS] = a.offset[groups], t.counts[COUNT_BLOCKS] = blocks;
        t.counts[COUNT_TASKS1] = blocks * g.col_blocks1, t.counts[COUNT_TASKS2] = blocks * g.col_blocks2;
    }
}

// A row block among those of its group and its segment; all counted in row blocks.
struct block_place { int block, group, start, end, segment, segment_start, segment_end; };
__device__ __forceinline__ block_place place_of_block(const open_globals &g, const build_arrays &a, int block) {
    const int slot = block * g.row_block;
    int group = 0;
    for (int end = g.segments * g.num_local; end - group > 1;) {  // the last one that begins here or before
        const int middle = (group + end) / 2;
        if (a.offset[middle] <= slot) group = middle;
        else end = middle;
    }
    const int segment = g.segments == 1 ? 0 : group / g.num_local;
    return {block, group, blocks_of(g, a.offset[group]), blocks_of(g, a.offset[group + 1]), segment,
            blocks_of(g, a.offset[segment * g.num_local]), blocks_of(g, a.offset[(segment + 1) * g.num_local])};
}

// The row block's part of task_order of one GEMM: `passes` over the columns, in each of them supertiles of 8 row blocks, column
// by column, every second column upwards. A pass is a whole number of runs of `per_step` column blocks.
__device__ __forceinline__ void write_tasks(const open_globals &g, const build_place &me, const block_place &b, int col_blocks, int passes,
                                            int per_step, int4 *tasks) {
    constexpr int SUPERTILE = 8;
    const int tile = b.start + ((b.block - b.start) & -SUPERTILE), height = min(SUPERTILE, b.end - tile), down = b.block - tile;
    const column_tiles tiles{{passes, (col_blocks + per_step - 1) / per_step}, col_blocks, per_step};
#pragma unroll 1
    for (int col = me.lane; col < col_blocks; col += 32) {
        const int pass = passes == 1 ? 0 : tiles.group_of(col), first = passes == 1 ? 0 : tiles.first(pass), in_pass = col - first;
        const int before = b.segment_start * col_blocks + (b.segment_end - b.segment_start) * first +
                           (tile - b.segment_start) * (passes == 1 ? col_blocks : int(tiles.size(pass)));
        tasks[before + in_pass * height + (in_pass % 2 ? height - 1 - down : down)] =
            make_int4(b.segment, b.group - b.segment * g.num_local, b.block, col);
    }
}

// What there is of each row block, a warp for each, those of a block far apart: there may be few.
__device__ __forceinline__ void write_blocks(const open_globals &g, const build_place &me, const build_arrays &a) {
    const table_view &t = g.tables;
    const int num_blocks = blocks_of(g, a.offset[g.segments * g.num_local]);
#pragma unroll 1
    for (int block = me.warp * me.builders + me.block; block < num_blocks; block += OPEN_WARPS * me.builders) {
        const block_place b = place_of_block(g, a, block);
        const int first = block * g.row_block, rows = min(g.row_block, b.start * g.row_block + a.total[b.group] - first);
        if (me.lane == 0) t.block_group[block] = b.group, t.block_target[block] = rows;
#pragma unroll 1
        for (int slot = rows + me.lane; slot < g.row_block; slot += 32) t.slot_pair[first + slot] = -1;
#pragma unroll 1
        for (int gemm = 0; gemm < 2; ++gemm)
            write_tasks(g, me, b, gemm ? g.col_blocks2 : g.col_blocks1, gemm ? g.passes : 1, gemm ? g.per_step2 : 1, gemm ? t.tasks2 : t.tasks1);
    }
}

}  // namespace moe_tk::nvlink
