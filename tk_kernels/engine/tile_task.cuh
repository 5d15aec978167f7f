// Tasks: which output tile is computed next. One walker for all roles; two sources of tasks, both read on the device.
#pragma once

#include "../../thunderkittens/kittens.cuh"

namespace moe_tk {

// One output tile. Rows [row_block * BLOCK_M, + rows) of the slots belong to it; the rest of the block is padding.
struct tile_task {
    int segment, expert, row_block, col_block;
    int rows;
};

// From the schedule's table: (segment, expert, row block, column block) in the order of computation.
struct table_tasks {
    struct params {
        const int4 *tasks;         // (num_tasks,)
        const int *num_tasks_ptr;  // device count, or nullptr: num_tasks holds it
        int num_tasks;
        const int *block_rows;  // (row blocks,) rows that are not padding; nullptr: all
        int num_row_blocks;     // unused here
    };
    struct cursor {
        int count;
        __device__ explicit cursor(const params &p) : count(p.num_tasks_ptr ? __ldg(p.num_tasks_ptr) : p.num_tasks) {}
        __device__ __forceinline__ bool fetch(const params &p, int index, tile_task &t) const {
            if (index >= count) return false;
            const int4 row = __ldg(p.tasks + index);
            t.segment = row.x, t.expert = row.y, t.row_block = row.z, t.col_block = row.w;
            return true;
        }
    };
};

// Straight from expert_offsets, for callers without a table. Supertiles of SUPER_ROWS row blocks, column by column; the
// row order alternates from column to column, so that neighbours in the order always share a row or a column block.
struct offset_tasks {
    static constexpr int SUPER_ROWS = 8;
    struct params {
        const int *group_offsets;  // (num_groups + 1,) first slot of each group, multiples of block_m
        int num_groups, num_experts, num_col_blocks, block_m;
        const int *block_rows;  // as above
    };
    struct cursor {
        int group = -1, first_task = 0, end_task = 0, first_block = 0, end_block = 0;
        __device__ explicit cursor(const params &p) : end_block(__ldg(p.group_offsets) / p.block_m) {}
        // Indices must not decrease from call to call.
        __device__ __forceinline__ bool fetch(const params &p, int index, tile_task &t) {
            while (index >= end_task) {
                if (++group >= p.num_groups) {
                    group = p.num_groups;
                    return false;
                }
                first_block = end_block;
                end_block = __ldg(p.group_offsets + group + 1) / p.block_m;
                first_task = end_task;
                end_task += (end_block - first_block) * p.num_col_blocks;
            }
            const int in_group = index - first_task, per_super = SUPER_ROWS * p.num_col_blocks;
            const int super = in_group / per_super, in_super = in_group - super * per_super;
            const int super_block = first_block + super * SUPER_ROWS;
            const int height = min(SUPER_ROWS, end_block - super_block);
            const int col = in_super / height, step = in_super - col * height;
            t.segment = group / p.num_experts;
            t.expert = group - t.segment * p.num_experts;
            t.row_block = super_block + (col % 2 ? height - 1 - step : step);
            t.col_block = col;
            return true;
        }
    };
};

// What one block of a cluster does in one step: its own task and what it has in common with its neighbour's.
struct cluster_work {
    tile_task task;
    bool ghost;             // no task left for this block: it feeds its neighbour, computes and stores nothing
    bool share_a, share_b;  // both blocks need the same rows / the same columns of the same expert
};

// Blocks of a cluster take neighbouring tasks; a cluster takes every (number of clusters)-th group of them.
template <class Tasks, int CLUSTER> struct task_walker {
    using params = typename Tasks::params;
    struct step {
        tile_task tasks[CLUSTER];
        bool valid[CLUSTER];
    };
    typename Tasks::cursor cursor;
    __device__ explicit task_walker(const params &p) : cursor(p) {}

    __device__ __forceinline__ bool fetch(const params &p, int block_m, int index, step &s) {
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) {
            s.valid[i] = cursor.fetch(p, index * CLUSTER + i, s.tasks[i]);
            if (i == 0 && !s.valid[0]) return false;
            if (i > 0 && !s.valid[i]) s.tasks[i] = s.tasks[0];
            s.tasks[i].rows = p.block_rows ? __ldg(p.block_rows + s.tasks[i].row_block) : block_m;
        }
        return true;
    }
    static __device__ __forceinline__ cluster_work work_of(const step &s, int rank) {
        cluster_work w{s.tasks[0], !s.valid[0], false, false};
        if constexpr (CLUSTER == 2) {
            const tile_task &x = s.tasks[0], &y = s.tasks[1];
            w.share_a = x.row_block == y.row_block;
            w.share_b = x.col_block == y.col_block && x.expert == y.expert;
            if (rank == 1) w.task = y, w.ghost = !s.valid[1];
        }
        return w;
    }
};

// Calls body(cluster_work) for every task of this block, in order; the next task is fetched before the body runs.
template <class Tasks, int CLUSTER, class Body>
__device__ __forceinline__ void for_each_task(const typename Tasks::params &p, int block_m, int cluster_rank, Body &&body) {
    static_assert(CLUSTER == 1 || CLUSTER == 2, "clusters of one or two blocks");
    using walker_t = task_walker<Tasks, CLUSTER>;
    walker_t walker(p);
    typename walker_t::step now, next;
    const int stride = gridDim.x / CLUSTER;
    bool have = false;
    for (int i = blockIdx.x / CLUSTER;; i += stride) {
        const bool more = walker.fetch(p, block_m, i, next);
        if (have) body(walker_t::work_of(now, cluster_rank));
        if (!more) return;
        now = next;
        have = true;
    }
}

}  // namespace moe_tk
