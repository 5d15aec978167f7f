// The pairs of all ranks in the order of slots: where each goes, which jobs there are, and what else is stored of each pair.
//
// Both orders are counting sorts of pairs by group, stable in (token, choice): the slots of all pairs, and job_order of each
// token's last one, in the order of slots. Which pair of a token that is follows from its groups alone, so one pass counts both,
// and one sum over warps, blocks and groups places both. The schedule's delivery_order is not built: GEMM 1 gathers.
// Counting leaves in shared memory what a second pass over the pairs would find again, and a block brings its pairs into the order
// of slots there, so that what is stored by slot is stored side by side.
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

// The same of the pairs of one block in one round.
struct round_counts {
    __device__ static uint32_t pack(int pairs, int lasts) { return uint32_t(pairs) | uint32_t(lasts) << 16; }
    __device__ static group_counts unpack(uint32_t v) { return {int(v & 0xffff), int(v >> 16)}; }
};

// What is kept of a pair between the passes, beside its weight: its group, how many of that its warp has had before, and whether it
// is the last of its token's pairs; or -1.
struct pair_key {
    static constexpr int GROUP_BITS = 11, RANK_BITS = 15, LAST = 1 << 30;
    __device__ static int pack(int group, int rank, bool last) { return group | rank << GROUP_BITS | (last ? LAST : 0); }
    __device__ static int group(int key) { return key & ((1 << GROUP_BITS) - 1); }
    __device__ static int rank(int key) { return key >> GROUP_BITS & ((1 << RANK_BITS) - 1); }
};
static_assert(MAX_GROUPS <= 1 << pair_key::GROUP_BITS && OPEN_SHARED_BYTES / PAIR_BYTES < 1 << pair_key::RANK_BITS);
static_assert(pair_key::GROUP_BITS + pair_key::RANK_BITS < 30 && pair_key::RANK_BITS <= 16);

// Group of an id at this rank, or -1.
__device__ __forceinline__ int group_of(const open_globals &g, int id, int segment) {
    const int local = id - g.first_expert;
    return id >= 0 && local >= 0 && local < g.num_local ? segment * g.num_local + local : -1;
}

// The tokens of a block, which it takes in rounds of g.room.tokens; mostly it is one.
struct token_range { int first, last; };
__device__ __forceinline__ token_range tokens_of(const open_globals &g, const build_place &me, const open_shared &s) {
    const int all = s.first_token[g.call.world], each = me.builders == 1 ? all : (all + OPEN_CLUSTER - 1) / OPEN_CLUSTER;
    const int first = min(all, me.block * each);
    return {first, min(all, first + each)};
}

// A warp takes its tokens of a round in steps of 32 / k whole ones, a lane for each pair.
struct token_walk {
    int round;          // its first token
    int first, last;    // of this warp
    int per_step;
    int token, choice;  // of this lane, in a step
};
__device__ __forceinline__ token_walk walk_of(const open_globals &g, const build_place &me, const token_range &block, int round) {
    const int count = min(block.last - round, g.room.tokens), each = (count + g.room.warps - 1) / g.room.warps;
    token_walk w;
    w.round = round, w.first = round + min(count, me.warp * each);
    w.last = me.warp < g.room.warps ? min(round + count, w.first + each) : w.first;
    w.per_step = g.choices.divide(32), w.token = g.choices.divide(me.lane), w.choice = me.lane - w.token * g.call.top_k;
    return w;
}
// Calls body(rank, from, to) for the runs of one rank's tokens that the warp's are made of.
template <class Body> __device__ __forceinline__ void for_each_run(const open_shared &s, const token_walk &w, Body &&body) {
    int from = w.first;
#pragma unroll 1
    for (int rank = 0; from < w.last; ++rank) {
        const int to = min(w.last, s.first_token[rank + 1]);
        if (to <= from) continue;
        body(rank, from, to);
        from = to;
    }
}

// Slots of a token follow its pairs' (group, choice), since a token is in one segment and earlier than the next one: the last one of
// its pairs has the largest of these. Those of earlier tokens of the step are larger, so that later ones cannot be in the way.
__device__ __forceinline__ bool is_last(const open_globals &g, const build_place &me, const token_walk &w, int group) {
    const int mine = (31 - w.token) << 16 | (group < 0 ? 0 : group * 32 + w.choice + 1);
    int most = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {  // of the 2 d pairs from this one on
        if (d >= g.call.top_k) break;
        most = max(most, __shfl_down_sync(0xffffffff, most, d));
    }
    return __shfl_sync(0xffffffff, most, me.lane - w.choice) == mine && group >= 0;
}
static_assert(MAX_GROUPS * 32 < 1 << 16);

// Counts the pairs of a step in the warp's histogram; returns what it held before each pair.
__device__ __forceinline__ uint32_t count_step(uint32_t *mine, int group, bool last, int lane) {
    const uint32_t same = __match_any_sync(0xffffffff, group), before = same & ((1u << lane) - 1);
    const uint32_t lasts = __ballot_sync(0xffffffff, last);
    const uint32_t old = group >= 0 ? mine[group] : 0;
    __syncwarp();
    if (group >= 0 && before == 0) mine[group] = old + round_counts::pack(__popc(same), __popc(same & lasts));
    __syncwarp();
    return old + round_counts::pack(__popc(before), __popc(before & lasts));
}

// Loads pairs into the stash. All loads of LOOKAHEAD steps are in flight together.
__device__ __forceinline__ void load_pairs(const int2 *from, int2 *to, int count, int lane) {
    constexpr int LOOKAHEAD = 8;
#pragma unroll 1
    for (int first = lane; first < count; first += 32 * LOOKAHEAD) {
        int2 pair[LOOKAHEAD];
#pragma unroll
        for (int u = 0; u < LOOKAHEAD; ++u)
            if (first + 32 * u < count) pair[u] = __ldcg(from + first + 32 * u);
#pragma unroll
        for (int u = 0; u < LOOKAHEAD; ++u)
            if (first + 32 * u < count) to[first + 32 * u] = pair[u];
    }
    __syncwarp();  // a lane counts what others have loaded
}

// Loads and counts the pairs of a warp: instead of each id its pair_key stays in the stash.
__device__ __forceinline__ void count_warp(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a,
                                           const token_walk &w, uint32_t parity) {
    const int k = g.call.top_k, step_pairs = w.per_step * k, groups = g.segments * g.num_local;
    uint32_t *mine = a.histogram + me.warp * groups;
    if (me.warp < g.room.warps)
#pragma unroll 1
        for (int i = me.lane; i < groups; i += 32) mine[i] = 0;
    for_each_run(s, w, [&](int rank, int from, int to) {
        const int first_token = s.first_token[rank], count = s.first_token[rank + 1] - first_token;
        int2 *stash = a.stash + (from - w.round) * k;
        load_pairs(g.call.routing(g.call.rank, parity, rank) + (from - first_token) * k, stash, (to - from) * k, me.lane);
        stash += me.lane;
#pragma unroll 1
        for (; from < to; from += w.per_step, stash += step_pairs) {
            const int token = from + w.token;
            const bool used = me.lane < step_pairs && token < to;
            const int segment = g.segments == 1 ? 0 : int(uint32_t(token - first_token) * uint32_t(g.segments) / uint32_t(count));
            const int group = used ? group_of(g, stash->x, segment) : -1;
            const bool last = is_last(g, me, w, group);
            const group_counts before = round_counts::unpack(count_step(mine, group, last, me.lane));
            if (used) stash->x = group < 0 ? -1 : pair_key::pack(group, before.pairs, last);
            if (last) a.last_rank[token - w.round] = uint16_t(before.lasts);
        }
    });
}

// Exclusive sums over the block of N values per thread; `total` are the sums of all. A __syncthreads() between two uses of the same
// warp_sum.
template <int N>
__device__ __forceinline__ void block_scan(int (&value)[N], const build_place &me, int (*warp_sum)[OPEN_WARPS], int (&total)[N]) {
    const auto warp_scan = [&](int v) {
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(0xffffffff, v, d);
            if (me.lane >= d) v += below;
        }
        return v;
    };
    int sum[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum[i] = warp_scan(value[i]);
        if (me.lane == 31) warp_sum[i][me.warp] = sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int mine = me.lane < OPEN_WARPS ? warp_sum[i][me.lane] : 0, warps = warp_scan(mine);
        total[i] = __shfl_sync(0xffffffff, warps, 31);
        value[i] = __shfl_sync(0xffffffff, warps - mine, me.warp) + sum[i] - value[i];
    }
}

// A thread has the same groups in all that follows.
constexpr int GROUPS_PER_THREAD = (MAX_GROUPS + OPEN_THREADS - 1) / OPEN_THREADS;
__device__ __forceinline__ int groups_per_thread(const open_globals &g) { return g.segments * g.num_local <= OPEN_THREADS ? 1 : GROUPS_PER_THREAD; }
template <class Body> __device__ __forceinline__ void for_my_groups(const open_globals &g, const build_place &me, Body &&body) {
    const int groups = g.segments * g.num_local, each = groups_per_thread(g);
#pragma unroll
    for (int i = 0; i < GROUPS_PER_THREAD; ++i)
        if (i < each && me.thread * each + i < groups) body(i, me.thread * each + i);
}

// Turns the counts of each (warp, group) into those of the warps before it. Returns their sum.
__device__ __forceinline__ uint32_t sum_warps(const open_globals &g, const build_arrays &a, int group) {
    constexpr int BATCH = 4;  // room_for gives a multiple of it
    const int groups = g.segments * g.num_local;
    uint32_t sum = 0;
#pragma unroll 1
    for (int warp = 0; warp < g.room.warps; warp += BATCH) {
        uint32_t *row = a.histogram + warp * groups + group, here[BATCH];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) here[u] = row[u * groups];
#pragma unroll
        for (int u = 0; u < BATCH; ++u) row[u * groups] = sum, sum += here[u];
    }
    return sum;
}

// Counts a round of the block's pairs; leaves a.in_round and where each group begins among them. Returns their number.
__device__ __forceinline__ int count_round(const open_globals &g, const build_place &me, open_shared &s, const build_arrays &a,
                                           const token_walk &w, uint32_t parity) {
    count_warp(g, me, s, a, w, parity);
    __syncthreads();
    int at[1] = {0}, total[1], pairs[GROUPS_PER_THREAD];
    for_my_groups(g, me, [&](int i, int group) {
        const uint32_t sum = sum_warps(g, a, group);
        a.in_round[group] = sum;
        at[0] += pairs[i] = round_counts::unpack(sum).pairs;
    });
    block_scan(at, me, s.round_sum, total);
    for_my_groups(g, me, [&](int i, int group) {
        a.places[group].x = at[0];
        at[0] += pairs[i];
    });
    return total[0];
}

// Adds a round's counts to those of the block.
__device__ __forceinline__ void add_counts(const open_globals &g, const build_place &me, const build_arrays &a, bool first) {
    uint64_t *own = a.inbox + me.block * g.segments * g.num_local;
    for_my_groups(g, me, [&](int, int group) {
        const group_counts more = round_counts::unpack(a.in_round[group]);
        own[group] = (first ? 0 : own[group]) + group_counts::pack(more.pairs, more.lasts);
    });
}

// Gives the block's counts to all blocks that build.
__device__ __forceinline__ void share_counts(const open_globals &g, const build_place &me, const build_arrays &a) {
    if (me.builders == 1) return;  // a thread goes on with the groups that it has counted
    const int groups = g.segments * g.num_local;
    for_my_groups(g, me, [&](int, int group) {
        const uint64_t sum = a.inbox[me.block * groups + group];
#pragma unroll 1
        for (int block = 0; block < OPEN_CLUSTER; ++block) in_block(a.inbox, block)[me.block * groups + group] = sum;
    });
    // 3 of 3: releases the warps that have written, acquires their sums. Behind it no block touches another one's memory, so each
    // may leave when it likes.
    cluster_barrier(me.warp * 32 * groups_per_thread(g) < groups);
}

// Fills what a block knows of each group.
__device__ __forceinline__ void place_groups(const open_globals &g, const build_place &me, open_shared &s, const build_arrays &a) {
    const int groups = g.segments * g.num_local;
    group_counts before[GROUPS_PER_THREAD];
    int padded[GROUPS_PER_THREAD], lasts[GROUPS_PER_THREAD], at[2] = {0, 0}, total[2];
    for_my_groups(g, me, [&](int i, int group) {
        int pairs = 0;
        before[i] = {0, 0}, lasts[i] = 0;
#pragma unroll 2
        for (int block = 0; block < OPEN_CLUSTER; ++block) {  // two loads in flight: with more, registers spill
            if (block >= me.builders) continue;
            if (block == me.block) before[i] = {pairs, lasts[i]};
            const group_counts here = group_counts::unpack(a.inbox[block * groups + group]);
            pairs += here.pairs, lasts[i] += here.lasts;
        }
        a.total[group] = pairs;
        padded[i] = (pairs + g.row_block - 1) & -g.row_block;
        at[0] += padded[i], at[1] += lasts[i];
    });
    block_scan(at, me, s.warp_sum, total);
    for_my_groups(g, me, [&](int i, int group) {
        a.offset[group] = at[0];
        a.places[group].y = at[0] + before[i].pairs, a.first_job[group] = at[1] + before[i].lasts;
        at[0] += padded[i], at[1] += lasts[i];
    });
    if (me.thread == 0) {
        a.offset[groups] = total[0];
        if (me.block == 0) g.tables.counts[COUNT_JOBS] = total[1];
    }
}

// The slot of each pair of a warp, its place in the block's order of slots, and the job of its token where it is the last one.
__device__ __forceinline__ void place_warp(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a,
                                           const token_walk &w) {
    const call_view &c = g.call;
    const table_view &t = g.tables;
    const int k = c.top_k, step_pairs = w.per_step * k;
    const uint32_t *mine = a.histogram + me.warp * g.segments * g.num_local;
    for_each_run(s, w, [&](int rank, int from, int to) {
        const int first_token = s.first_token[rank], to_row = rank * c.max_tokens - first_token;
        const int to_number = (to_row + w.round) * k;
#pragma unroll 1
        while (from < to) {  // chunk by chunk
            const int chunk = g.chunks.divide(from - first_token), last = min(to, first_token + (chunk + 1) * c.job_chunk);
            int jobs = 0;
#pragma unroll 1
            for (; from < last; from += w.per_step) {
                const int index = (from - w.round) * k + me.lane, token = from + w.token;
                const bool used = me.lane < step_pairs && token < last;
                const int key = used ? a.stash[index].x : -1, group = pair_key::group(key);
                const bool job = key >= 0 && key & pair_key::LAST;
                int slot = -1;
                if (key >= 0) {
                    const group_counts before = round_counts::unpack(mine[group]);
                    const int2 place = a.places[group];
                    const int rank_in_block = before.pairs + pair_key::rank(key);
                    slot = place.y + rank_in_block;
                    a.sorted[place.x + rank_in_block] = uint16_t(index);
                    if (job) t.job_order[a.first_job[group] + before.lasts + a.last_rank[token - w.round]] = token + to_row;
                }
                if (used) t.slots[index + to_number] = slot;
                jobs += __popc(__ballot_sync(0xffffffff, job));
            }
            from = last;  // the last step may be a part of one
            if (me.lane == 0 && jobs > 0) atomicAdd(t.chunk_expected + rank * c.job_chunks + chunk, jobs);
        }
    });
}

// What is stored by slot, in the order of slots. A block's pairs of one group are side by side.
__device__ __forceinline__ void write_slots(const open_globals &g, const build_place &me, const open_shared &s, const build_arrays &a, int round,
                                            int pairs) {
    const int k = g.call.top_k;
    int first_rank = 0;
    while (round >= s.first_token[first_rank + 1] && first_rank + 1 < g.call.world) ++first_rank;
#pragma unroll 1
    for (int i = me.thread; i < pairs; i += OPEN_THREADS) {
        const int index = a.sorted[i];
        const int2 pair = a.stash[index], place = a.places[pair_key::group(pair.x)];
        const int slot = i - place.x + place.y, of_all = round * k + index;
        int rank = first_rank;
        while (of_all >= s.first_token[rank + 1] * k) ++rank;
        g.tables.slot_pair[slot] = of_all + (rank * g.call.max_tokens - s.first_token[rank]) * k;
        g.tables.slot_weight[slot] = __int_as_float(pair.y);
    }
}

// Where the block's pairs of the next round go.
__device__ __forceinline__ void pass_round(const open_globals &g, const build_place &me, const build_arrays &a) {
    for_my_groups(g, me, [&](int, int group) {
        const group_counts done = round_counts::unpack(a.in_round[group]);
        a.places[group].y += done.pairs, a.first_job[group] += done.lasts;
    });
}

// All that follows from each pair, and a.offset and a.total. Places want the counts of all pairs: a block whose pairs are in its
// shared memory by rounds counts them all first, and then once more as each round's turn comes.
__device__ __forceinline__ void build_pairs(const open_globals &g, const build_place &me, open_shared &s, const build_arrays &a, uint32_t parity) {
    const token_range block = tokens_of(g, me, s);
    bool placed = false;  // the groups
    for (int round = block.first;;) {
        const token_walk w = walk_of(g, me, block, round);
        const int pairs = count_round(g, me, s, a, w, parity), next = round + g.room.tokens;
        if (!placed) {
            add_counts(g, me, a, round == block.first);
            placed = next >= block.last;
            if (placed) {
                stamp_lap_block(stamp_kind::open_count);
                share_counts(g, me, a);
                place_groups(g, me, s, a);
                stamp_lap_block(stamp_kind::open_groups);
            }
            if (!placed || round != block.first) {  // one round is still there
                round = placed ? block.first : next;
                continue;
            }
        }
        __syncthreads();  // a warp looks at places of all groups
        place_warp(g, me, s, a, w);
        __syncthreads();
        write_slots(g, me, s, a, round, pairs);
        if (next >= block.last) break;
        __syncthreads();
        pass_round(g, me, a);
        round = next;
    }
    stamp_lap_block(stamp_kind::open_pairs);
}

}  // namespace moe_tk::nvlink
