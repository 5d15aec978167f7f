// How the sums of a call are cut into items: column groups of GEMM 2 and their tiles, slices of their columns, batches of entries,
// and the one list in which jobs and own tokens stand. Index arithmetic alone, the same on host and device, so that a test can go
// through all of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../platform/platform.hpp"

namespace moe_tk::nvlink {

constexpr int MAX_COL_GROUPS = 4;  // groups of column blocks of GEMM 2 whose sums leave on their own
constexpr int GROUP_COLS = 256;    // a group is a whole number of steps of so many columns, the last of which may be cut
constexpr int SLICE_STEP = 512, ENOUGH_ITEMS = 1024;

// Groups of steps of GEMM 2's columns: a token's sum over one group leaves when that group is done.
struct column_groups {
    int groups, steps;
    MOE_TK_FN int of(int step) const { return ((step + 1) * groups - 1) / steps; }
    MOE_TK_FN int first(int group) const { return group * steps / groups; }
};

// Column groups of a call, the same on all ranks and in all patterns: watermarks are by group.
inline column_groups groups_of(int hidden) {
    const int steps = (hidden + GROUP_COLS - 1) / GROUP_COLS;
    return {std::min(steps, MAX_COL_GROUPS), steps};
}

// Column blocks of a GEMM, `per_step` to a step: which group each lies in, and which ones a group has. Rank by rank and pattern by
// pattern they may be wider or narrower; the groups are the same.
struct column_tiles {
    column_groups columns;
    int col_blocks, per_step;
    MOE_TK_FN int group_of(int col_block) const { return columns.of(col_block / per_step); }
    MOE_TK_FN int first(int group) const {
        const int at = columns.first(group) * per_step;
        return at < col_blocks ? at : col_blocks;  // the last step may have fewer
    }
    MOE_TK_FN uint32_t size(int group) const { return uint32_t(first(group + 1) - first(group)); }
};
inline column_tiles tiles_of(int hidden, int block_cols) {
    return {groups_of(hidden), (hidden + block_cols - 1) / block_cols, GROUP_COLS / block_cols};
}

// How one kind of work is cut: for each column group, `batches` runs of `batch` entries in `slices` slices of columns each.
// Few entries are cut finer, so that all warps have something; many are taken several at a time, which shares their waits and fences.
struct work_cut {
    int batch, batches, slices;
    MOE_TK_FN int items() const { return batches * slices; }  // of one column group
};
MOE_TK_FN work_cut cut_work(int entries, int groups, int group_width, int most_in_batch) {
    const int most_slices = (group_width + SLICE_STEP - 1) / SLICE_STEP, all = std::max(1, entries * groups);
    const int slices = std::max(1, std::min(most_slices, ENOUGH_ITEMS / all));
    const int batch = std::max(1, std::min(most_in_batch, all * slices / ENOUGH_ITEMS));
    return {batch, (entries + batch - 1) / batch, slices};
}

struct column_slice { int first, last; };
// May be empty, where a group has fewer steps than slices.
MOE_TK_FN column_slice slice_of(column_groups columns, int hidden, int group, int index, int slices) {
    const int first = columns.first(group) * GROUP_COLS, last = std::min(hidden, columns.first(group + 1) * GROUP_COLS);
    const int steps = (last - first + SLICE_STEP - 1) / SLICE_STEP;
    return {first + index * steps / slices * SLICE_STEP, std::min(last, first + (index + 1) * steps / slices * SLICE_STEP)};
}

// All work in one list, dispensed so that any number of warps helps: the jobs group by group, then the own tokens in the same way. Jobs
// wait for this GPU's tiles only and stand before all tokens on every rank, so no two ranks can wait for each other, and no warp
// waits for another rank's sums while there are some of its own to take.
struct work_list {
    int groups, jobs, tokens;  // items of one column group
    struct place {
        bool is_job;
        int group, index;
    };
    MOE_TK_FN int size() const { return groups * (jobs + tokens); }
    MOE_TK_FN place at(int item) const {
        for (int step = 0;; ++step) {
            const bool is_job = step < groups;
            const int items = is_job ? jobs : tokens;
            if (item < items) return {is_job, is_job ? step : step - groups, item};
            item -= items;
        }
    }
};

}  // namespace moe_tk::nvlink
