// First launch of a call: tells all ranks where this rank's tokens want to go, learns the same of them, exports the
// tokens, and builds the schedule tables. No host synchronisation, and the same launch for every routing.
//
// Roles: cluster 0 exchanges and builds (its 8 blocks are resident together by definition, so they may wait for each
// other); all other clusters copy this rank's tokens into symmetric memory.
#pragma once

#include <cooperative_groups.h>

#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

constexpr int OPEN_THREADS = 1024, OPEN_WARPS = OPEN_THREADS / 32;
constexpr int BUILD_THREADS = OPEN_CLUSTER * OPEN_THREADS, BUILD_WARPS = OPEN_CLUSTER * OPEN_WARPS;

// Division of small numbers by one that the host knows. Exact for numerators below 2^32 / divisor.
struct divisor {
    uint32_t value, magic;
    explicit divisor(int d) : value(uint32_t(d)), magic(uint32_t(0xffffffffull / uint32_t(d) + 1)) {}  // unused for 1
    __device__ __forceinline__ int divide(int n) const { return value == 1 ? n : int(__umulhi(uint32_t(n), magic)); }
};

struct open_globals {
    call_view call;
    table_view tables;
    counter_view counters;
    uint64_t signature;
    const void *hidden_states;  // [num_tokens, H] bf16
    const void *topk_ids;       // [num_tokens, k] i32 or i64
    const void *topk_weights;   // [num_tokens, k] f32 or bf16
    int num_tokens, refused;
    int ids_are_64, weights_are_bf16;
    int num_experts, first_expert, num_local, tensor_parallel;
    divisor choices;            // by k
    int row_block, segments, max_blocks;
    int col_blocks1, col_blocks2;  // of the two GEMMs
    uint32_t *epoch;            // written by the last block
    uint32_t *blocks_done, *copies_done;  // self-resetting
    int *scratch;               // [SCRATCH_INTS]
};

struct open_shared {
    int first_token[MAX_WORLD + 1];  // ranks' tokens in one row, without gaps
    int offset[MAX_GROUPS + 1], total[MAX_GROUPS], first_slot[MAX_GROUPS];  // the last: of this block's first pair
    int warp_sum[2][OPEN_WARPS];
    uint32_t histogram[];  // [OPEN_WARPS, groups]
};
inline int open_shared_bytes(int groups) { return int(sizeof(open_shared)) + OPEN_WARPS * groups * 4; }

struct build_place {  // where a thread stands in cluster 0
    int block, warp, lane, thread, global_warp, global_thread;
};

__device__ __forceinline__ void cluster_barrier() { cooperative_groups::this_cluster().sync(); }

// ---- exchange -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ int read_id(const open_globals &g, int64_t i) {
    const int64_t id = g.ids_are_64 ? static_cast<const int64_t *>(g.topk_ids)[i] : static_cast<const int32_t *>(g.topk_ids)[i];
    return id < 0 || id >= g.num_experts ? -1 : int(id);
}
__device__ __forceinline__ float read_weight(const open_globals &g, int64_t i) {
    if (!g.weights_are_bf16) return static_cast<const float *>(g.topk_weights)[i];
    return __uint_as_float(uint32_t(static_cast<const uint16_t *>(g.topk_weights)[i]) << 16);
}

// ORDER routing: every thread's stores, fence.sys, cluster barrier, then st.release.sys of the epoch; await_headers acquires.
__device__ __forceinline__ void send_routing(const open_globals &g, const build_place &me, uint32_t epoch) {
    const call_view &c = g.call;
    const uint32_t parity = epoch & 1;
    const int pairs = g.refused ? 0 : g.num_tokens * c.top_k;
#pragma unroll 4
    for (int i = me.global_thread; i < pairs; i += BUILD_THREADS) {
        const int2 pair = make_int2(read_id(g, i), __float_as_int(read_weight(g, i)));
        for (int to = 0; to < c.world; ++to) c.routing(to, parity, c.rank)[i] = pair;
    }
    if (me.global_thread < c.world)
        *c.header(me.global_thread, parity, c.rank) = {g.signature, g.num_tokens, g.refused};
    fence_sys();
    cluster_barrier();
    if (me.global_thread < c.world) store_release_sys(c.posted(me.global_thread, c.rank), epoch);
}

__device__ __forceinline__ void zero_counters(const open_globals &g, const build_place &me) {
    for (int i = me.global_thread; i < g.max_blocks; i += BUILD_THREADS) g.counters.arrived[i] = 0, g.counters.l2_done[i] = 0;
    for (int i = me.global_thread; i < g.call.world * g.call.job_chunks; i += BUILD_THREADS)
        g.counters.job_done[i] = 0, g.tables.chunk_expected[i] = 0;
    if (me.global_thread == 0) *g.counters.next_row = 0, *g.counters.next_job = 0, *g.counters.next_token = 0;
}

// What the headers of all ranks amount to, one rank per lane: the first reason in rank order, the same on all ranks.
struct verdict {
    void_reason reason;
    int rank, value;
};
__device__ __forceinline__ verdict judge(const open_globals &g, int lane, uint64_t signature, int num_tokens, int refused) {
    const bool real = lane < g.call.world;
    const uint64_t wanted = __shfl_sync(0xffffffff, signature, 0);
    const auto first_of = [&](bool bad) { return __ffs(__ballot_sync(0xffffffff, real && bad)) - 1; };
    const int by_refusal = first_of(refused), by_signature = first_of(signature != wanted), by_size = first_of(num_tokens > g.call.max_tokens);
    verdict v{void_reason::none, 0, 0};
    if (by_refusal >= 0) v = {void_reason::refused, by_refusal, 0};
    else if (by_signature >= 0) v = {void_reason::disagree, by_signature, 0};
    else if (by_size >= 0) v = {void_reason::capacity, by_size, 0};
    v.value = __shfl_sync(0xffffffff, num_tokens, v.rank);
    return v;
}

// Waits for all ranks and leaves their token counts in shared memory; all zero if the call cannot be computed. All blocks
// of the cluster come to the same answer, else their tables would not fit together.
__device__ __forceinline__ void await_headers(const open_globals &g, const build_place &me, uint32_t epoch, open_shared &s) {
    const call_view &c = g.call;
    uint4 header{};
    if (me.warp == 0) {
        bool ok = true;
        if (me.lane < c.world) {
            ok = spin_until(c.posted(c.rank, me.lane), epoch, c, {phase_id::exchange, role_id::send, me.lane, me.lane});
            header = __ldcg(reinterpret_cast<const uint4 *>(c.header(c.rank, epoch & 1, me.lane)));
        }
        ok = __all_sync(0xffffffff, ok);
        const verdict v = judge(g, me.lane, uint64_t(header.y) << 32 | header.x, int(header.z), int(header.w));
        if (ok && v.reason != void_reason::none && me.global_thread == 0) {
            c.host->void_rank = v.rank, c.host->void_value = v.value;
            store_release_sys(&c.host->void_reason, uint32_t(v.reason));
        }
        if (me.lane == 0) g.scratch[me.block] = ok && v.reason == void_reason::none;
    }
    cluster_barrier();
    if (me.warp == 0) {
        const bool ok = __all_sync(0xffffffff, me.lane >= OPEN_CLUSTER || __ldcg(g.scratch + me.lane % OPEN_CLUSTER) != 0);
        const int count = ok && me.lane < c.world ? int(header.z) : 0;
        int sum = count;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(0xffffffff, sum, d);
            if (me.lane >= d) sum += below;
        }
        s.first_token[me.lane + 1] = sum;
        if (me.lane == 0) s.first_token[0] = 0;
        if (me.block == 0 && me.lane < c.world) g.tables.token_counts[me.lane] = count;
    }
    __syncthreads();
}

// ---- tables -----------------------------------------------------------------------------------------------------------
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
__device__ __forceinline__ int owner_of(const open_globals &g, int id) {
    const int base = g.num_experts / g.call.world, extra = g.num_experts % g.call.world, large = extra * (base + 1);
    return id < large ? id / (base + 1) : extra + (id - large) / max(base, 1);
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

__device__ __forceinline__ void write_groups(const open_globals &g, const build_place &me, const open_shared &s, int groups, uint8_t *marks) {
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
        for (int slot = first + rows + me.lane; slot < end; slot += 32) t.slot_pair[slot] = -1, marks[slot] = 0;
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

// Per token: marks its smallest and largest slot, counts its job, and notes who works for it.
__device__ __forceinline__ void mark_tokens(const open_globals &g, const build_place &me, const open_shared &s, uint32_t parity, uint8_t *marks) {
    const call_view &c = g.call;
    const int k = c.top_k;
    const token_range range = tokens_of_warp(g, s, me.global_warp);
    for (int token = range.first + me.lane; token < range.last; token += 32) {
        const token_place at = place_of(g, s, token);
        const int *slots = g.tables.slots + at.row * k;
        int smallest = INT32_MAX, largest = -1;
#pragma unroll 8
        for (int j = 0; j < k; ++j) {
            const int slot = __ldcg(slots + j);
            if (slot >= 0) smallest = min(smallest, slot), largest = max(largest, slot);
        }
#pragma unroll 8
        for (int j = 0; j < k; ++j) {
            const int slot = __ldcg(slots + j);
            if (slot >= 0) marks[slot] = (slot == smallest ? MARK_FIRST : 0) | (slot == largest ? MARK_LAST : 0);
        }
        if (largest >= 0) atomicAdd(g.tables.chunk_expected + at.rank * c.job_chunks + at.t / c.job_chunk, 1);
        if (at.rank != c.rank) continue;
        long long who = 0;
#pragma unroll 8
        for (int j = 0; j < k; ++j) {
            const int id = __ldcg(&c.routing(c.rank, parity, c.rank)[at.t * k + j].x);
            if (id >= 0) who |= g.tensor_parallel ? (1ll << c.world) - 1 : 1ll << owner_of(g, id);
        }
        g.tables.contributors[at.t] = who;
    }
}

// task_order of one GEMM: supertiles of 8 row blocks, column by column, every second column upwards. A warp per row block.
__device__ __forceinline__ void write_tasks(const open_globals &g, const build_place &me, const open_shared &s, int col_blocks, int4 *tasks) {
    constexpr int SUPERTILE = 8;
    const int num_blocks = s.offset[g.segments * g.num_local] / g.row_block;
    for (int block = me.global_warp; block < num_blocks; block += BUILD_WARPS) {
        const int group = __ldcg(g.tables.block_group + block);
        const int start = s.offset[group] / g.row_block, end = s.offset[group + 1] / g.row_block;
        const int tile = start + (block - start) / SUPERTILE * SUPERTILE, height = min(SUPERTILE, end - tile), down = block - tile;
        for (int col = me.lane; col < col_blocks; col += 32)
            tasks[tile * col_blocks + col * height + (col % 2 ? height - 1 - down : down)] =
                make_int4(group / g.num_local, group % g.num_local, block, col);
    }
}

// Compacts the marked slots into delivery_order (first slots) and job_order (last slots). Four slots per lane and step.
__device__ __forceinline__ void write_orders(const open_globals &g, const build_place &me, open_shared &s, int groups, const uint8_t *marks) {
    int *block_counts = g.scratch;  // [OPEN_CLUSTER, 2]
    const int num_slots = s.offset[groups], steps = (num_slots + 127) / 128, each = (steps + BUILD_WARPS - 1) / BUILD_WARPS;
    const int first = min(steps, me.global_warp * each), last = min(steps, first + each);
    const auto load = [&](int step) {
        const int slot = step * 128 + me.lane * 4;
        return slot < num_slots ? __ldcg(reinterpret_cast<const uint32_t *>(marks + slot)) : 0u;
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

__device__ __forceinline__ void exchange_and_build(const open_globals &g, uint8_t *marks, uint32_t epoch, open_shared &s) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
    const build_place me{block, warp, lane, int(threadIdx.x), block * OPEN_WARPS + warp, block * OPEN_THREADS + int(threadIdx.x)};
    const int groups = g.segments * g.num_local;
    const uint32_t parity = epoch & 1;
    zero_counters(g, me);
    send_routing(g, me, epoch);
    await_headers(g, me, epoch, s);
    count_pairs(g, me, s, groups, parity);
    place_groups(g, me, s, groups);
    write_groups(g, me, s, groups, marks);
    place_pairs(g, me, s, groups, parity);
    mark_tokens(g, me, s, parity, marks);
    cluster_barrier();
    write_tasks(g, me, s, g.col_blocks1, g.tables.tasks1);
    write_tasks(g, me, s, g.col_blocks2, g.tables.tasks2);
    write_orders(g, me, s, groups, marks);
}

// ORDER rows: the copies, then the last block's st.release.sys of the epoch; pull_rows acquires it before its first load.
__device__ __forceinline__ void export_rows(const open_globals &g, uint32_t epoch) {
    const call_view &c = g.call;
    const int num_blocks = gridDim.x - OPEN_CLUSTER, block = blockIdx.x - OPEN_CLUSTER;
    const int64_t vectors = g.refused ? 0 : int64_t(g.num_tokens) * c.hidden / 8, stride = int64_t(num_blocks) * OPEN_THREADS;
    const uint4 *from = static_cast<const uint4 *>(g.hidden_states);
    uint4 *to = c.row<uint4>(c.rank, 0);
    int64_t i = int64_t(block) * OPEN_THREADS + threadIdx.x;
    for (; i + 3 * stride < vectors; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) v[u] = __ldg(from + i + u * stride);
#pragma unroll
        for (int u = 0; u < 4; ++u) to[i + u * stride] = v[u];
    }
    for (; i < vectors; i += stride) to[i] = __ldg(from + i);
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_sys();
    if (fetch_inc_wrap_acq_rel_gpu(g.copies_done, num_blocks - 1) != uint32_t(num_blocks - 1)) return;
    fence_sys();
    for (int to_rank = 0; to_rank < c.world; ++to_rank) store_release_sys(c.rows_posted(to_rank, c.rank), epoch);
}

__global__ __cluster_dims__(OPEN_CLUSTER, 1, 1) __launch_bounds__(OPEN_THREADS, 1) void open_call(
    const __grid_constant__ open_globals g, uint8_t *marks) {
    extern __shared__ __align__(16) uint8_t dynamic_shared[];
    const uint32_t epoch = *g.call.epoch_ptr + 1;
    if (blockIdx.x < OPEN_CLUSTER) exchange_and_build(g, marks, epoch, *reinterpret_cast<open_shared *>(dynamic_shared));
    else export_rows(g, epoch);
    __syncthreads();
    // All blocks have read the old epoch when the last one writes the new one.
    if (threadIdx.x == 0 && fetch_inc_wrap_acq_rel_gpu(g.blocks_done, gridDim.x - 1) == gridDim.x - 1) *g.epoch = epoch;
}

}  // namespace moe_tk::nvlink
