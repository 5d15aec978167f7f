// The schedule tables of one call in device memory, and the counters that its launches start from zero. docs/schedule.md
// gives the meaning; the row stride T is max_tokens of the workspace, so nothing depends on the sizes of a call.
#pragma once

#include <cstdint>

#include "call.cuh"

namespace moe_tk::nvlink {

// Blocks that build the tables. 16 would be possible on Hopper, but want 16 free multiprocessors side by side: one busy one in
// each group of them (a collective of another stream) would keep a call from starting.
constexpr int OPEN_CLUSTER = 8;
constexpr int MAX_GROUPS = 1536;      // segments * local experts: histograms lie in shared memory
constexpr int MAX_TOKENS = 1 << 21;   // of all ranks: group_counts, and 32-bit numbers of pairs

enum count_index { COUNT_SLOTS, COUNT_BLOCKS, COUNT_JOBS, COUNT_TASKS1, COUNT_TASKS2, NUM_COUNTS };

struct table_view {
    int *counts;             // [NUM_COUNTS]
    int *expert_offsets;     // [groups + 1]
    int *slots;              // [R * T, k]; rows beyond a rank's tokens are not written
    int *slot_pair;          // [max_slots]
    float *slot_weight;      // [max_slots] routing weight of each slot
    int *block_target;       // [max_blocks]
    int *block_group;        // [max_blocks]
    int *job_order;          // [R * T]
    int *chunk_expected;     // [R, job_chunks]
    int *expert_load;        // [E_local] of this call
    long long *load_total;   // [E_local] since the host reset it
    long long *contributors; // [T]
    int *token_counts;       // [R]
    int4 *tasks1, *tasks2;   // [max_blocks * column blocks] task_order of the two GEMMs
};

struct counter_view {        // zeroed by open_call
    uint32_t *l1_done;       // [max_blocks] column blocks of GEMM 1
    uint32_t *l2_done;       // [max_blocks, MAX_COL_GROUPS] column blocks of GEMM 2
    uint32_t *job_done;      // [R, job_chunks, MAX_COL_GROUPS] slices of jobs pushed
    uint32_t *next_item;     // dispenser of jobs and tokens
};

}  // namespace moe_tk::nvlink
