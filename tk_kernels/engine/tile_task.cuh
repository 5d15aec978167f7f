// Tasks: which output tile is computed next. One table, one walker for all roles.
#pragma once

#include "../../thunderkittens/kittens.cuh"

namespace moe_tk {

// One output tile. Rows [row_block * BLOCK_M, + rows) of the slots belong to it; the rest of the block is padding.
struct tile_task {
    int segment, expert, row_block, col_block;
    int rows;
};

// (segment, expert, row block, column block) in the order of computation: the schedule's task_order, or build_tasks.
struct task_table {
    const int4 *tasks;         // (num_tasks,)
    const int *num_tasks_ptr;  // device count, or nullptr: num_tasks holds it
    int num_tasks;
    const int *block_rows;  // (row blocks,) rows that are not padding; nullptr: all

    __device__ __forceinline__ int count() const { return num_tasks_ptr ? __ldg(num_tasks_ptr) : num_tasks; }
    __device__ __forceinline__ tile_task at(int index) const {
        const int4 row = __ldg(tasks + index);
        return {row.x, row.y, row.z, row.w, 0};
    }
};

// What one block of a cluster does in one step: its own task and what it has in common with its neighbour's.
struct cluster_work {
    tile_task task;
    uint32_t flags;  // bits, not bools: two of these live in the registers of the loader
    static constexpr uint32_t GHOST = 1, SHARE_A = 2, SHARE_B = 4;
    // No task left for this block: it feeds its neighbour, computes and stores nothing.
    __device__ __forceinline__ bool ghost() const { return flags & GHOST; }
    // Both blocks need the same rows / the same columns of the same expert.
    __device__ __forceinline__ bool share_a() const { return flags & SHARE_A; }
    __device__ __forceinline__ bool share_b() const { return flags & SHARE_B; }
};

// Blocks of a cluster take neighbouring tasks; a cluster takes every (number of clusters)-th group of them. False after the
// last task. Only the loader wants SHARING: what the blocks have in common.
template <int CLUSTER, bool SHARING>
__device__ __forceinline__ bool fetch_work(const task_table &table, int count, int block_m, int index, int rank,
                                           cluster_work &w) {
    static_assert(CLUSTER == 1 || CLUSTER == 2, "clusters of one or two blocks");
    const int first = index * CLUSTER;
    if (first >= count) return false;
    const bool ghost = first + rank >= count;
    w.task = table.at(ghost ? first : first + rank);
    w.flags = ghost ? cluster_work::GHOST : 0;
    if constexpr (CLUSTER == 2 && SHARING) {
        const tile_task other = table.at(first + 1 < count ? first + (1 - rank) : first);
        if (w.task.row_block == other.row_block) w.flags |= cluster_work::SHARE_A;
        if (w.task.col_block == other.col_block && w.task.expert == other.expert) w.flags |= cluster_work::SHARE_B;
    }
    w.task.rows = table.block_rows ? __ldg(table.block_rows + w.task.row_block) : block_m;
    return true;
}

// Calls body(cluster_work) for every task of this block, in order. What these roles read is in L1: the loader is ahead of them.
template <int CLUSTER, class Body>
__device__ __forceinline__ void for_each_task(const task_table &table, int block_m, int rank, Body &&body) {
    const int count = table.count(), stride = gridDim.x / CLUSTER;
    cluster_work now;
    for (int i = blockIdx.x / CLUSTER; fetch_work<CLUSTER, false>(table, count, block_m, i, rank, now); i += stride) body(now);
}

// The same for the loader: body(cluster_work, whether there is a next one, the next one). The next one is fetched before the body runs.
template <int CLUSTER, class Body>
__device__ __forceinline__ void for_each_task_ahead(const task_table &table, int block_m, int rank, Body &&body) {
    const int count = table.count(), stride = gridDim.x / CLUSTER;
    int i = blockIdx.x / CLUSTER;
    cluster_work now, next;
    bool more = fetch_work<CLUSTER, true>(table, count, block_m, i, rank, next);
    while (more) {
        now = next;
        more = fetch_work<CLUSTER, true>(table, count, block_m, i += stride, rank, next);
        body(now, more, next);
    }
}

}  // namespace moe_tk
