// The schedule tables, from the pairs of all ranks in this GPU's memory; docs/schedule.md has the meaning. What follows from each
// pair is sort_pairs.cuh; here is what follows from the numbers of the groups: row blocks and tasks.
#pragma once

#include "sort_pairs.cuh"

namespace moe_tk::nvlink {

// chunk_expected is added to by place_warp, behind barriers 1 to 3.
__device__ __forceinline__ void zero_chunks(const open_globals &g, const build_place &me) {
    if (me.block != 0) return;
#pragma unroll 1
    for (int i = me.thread; i < g.call.world * g.call.job_chunks; i += OPEN_THREADS) g.tables.chunk_expected[i] = 0;
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
