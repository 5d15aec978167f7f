// What a launch gets: pointers, sizes and tables. Filled by the binding with named fields; kernels follow, they decide nothing.
#pragma once

#include <cstdint>

#include "../protocol/heap.hpp"
#include "../protocol/ring.hpp"
#include "../protocol/wait.hpp"

namespace moe_tk::patterns {

// The tables of moe_tk.schedule (its docs give the meaning), R = world, T = row stride of this call.
struct schedule_view {
    int64_t tokens_per_rank = 0;  // T
    int64_t top_k = 0;
    int64_t num_local_experts = 0;
    int64_t row_block = 0;
    int64_t job_chunk = 0;
    int64_t num_blocks = 0, num_pull = 0, num_jobs = 0, num_tasks = 0;
    const int32_t *slots = nullptr;           // [R*T, k]
    const int32_t *slot_pair = nullptr;       // [num_blocks * row_block]
    const int32_t *delivery_order = nullptr;  // [num_pull]
    const int32_t *delivery_pos = nullptr;    // [num_pull] position among the rows of the same source
    const int32_t *block_target = nullptr;    // [num_blocks]
    const int32_t *block_group = nullptr;     // [num_blocks]
    const int32_t *tasks = nullptr;           // [num_tasks, 4]: phase or segment, group or expert, row block, column block
    const int32_t *job_order = nullptr;       // [num_jobs]
    const int32_t *chunk_expected = nullptr;  // [R, chunks of this call]
    const int32_t *send_order = nullptr;      // [R, T]
    const int32_t *send_count = nullptr;      // [R]
    const int64_t *contributors = nullptr;    // [T]
    int64_t num_chunks = 0;                   // columns of chunk_expected
};

// Counters of this rank that live as long as the workspace. Pairs (counter, want): counters only grow; the launch moves
// `want` on by what this call will add, so a gate compares against its own call and never sees an old one.
struct local_counters {
    uint32_t *arrived = nullptr, *arrived_want = nullptr;    // [max_blocks] rows placed
    uint32_t *l1_done = nullptr, *l1_want = nullptr;         // [max_blocks] column blocks of GEMM 1
    uint32_t *l2_done = nullptr, *l2_want = nullptr;         // [max_blocks] column blocks of GEMM 2
    uint32_t *freed = nullptr, *freed_want = nullptr;        // [max_blocks] rows whose job is combined
    uint32_t *job_done = nullptr, *job_want = nullptr;       // [R, job_chunks of the heap] jobs pushed
    uint32_t *received_want = nullptr;                       // [R, job_chunks] rows delivered here, for wires that count; else null
    uint32_t *progress = nullptr;                            // [1]
    uint64_t *last_forward_ns = nullptr;                     // [1]
};

struct activation_form {  // g * sigmoid(alpha * g) * (u + beta), g <= gate_limit, |u| <= up_limit
    float alpha = 1.0f;
    float beta = 0.0f;
    float gate_limit = 0.0f;  // 0 = no limit
    float up_limit = 0.0f;    // 0 = no limit
};

struct launch_globals {
    protocol::symmetric_heap heap;
    protocol::wait_context wait;
    protocol::op_id op = protocol::op_id::none;
    schedule_view schedule;
    local_counters counters;

    int64_t hidden = 0;        // width of a gathered row
    int64_t intermediate = 0;  // output columns of GEMM 1 = depth of GEMM 2
    int64_t out_width = 0;     // output columns of GEMM 2
    int64_t column_block = 64;
    int64_t send_chunk = 32;   // rows between two watermarks
    int64_t ring_blocks = 0;   // row blocks in gathered, activation and expert_out
    int64_t num_tokens = 0;    // of this rank

    const void *tokens = nullptr;      // [num_tokens, hidden] this rank's rows
    void *gathered = nullptr;          // [ring_blocks * row_block, hidden]
    const void *w13 = nullptr;         // [E_local, 2 * intermediate or intermediate, hidden]
    void *activated = nullptr;         // [ring_blocks * row_block, intermediate]
    const void *w2 = nullptr;          // [E_local, out_width, intermediate]
    void *expert_out = nullptr;        // [ring_blocks * row_block, out_width]
    void *out = nullptr;               // [num_tokens, out_width]
    const float *pair_weights = nullptr;  // [R*T, k] routing weights, null = all ones
    bool weights_before_l2 = false;       // else they are applied when the job is combined
    activation_form activation;

    int num_send = 1, num_place = 1, num_compute = 1, num_combine = 1;  // blocks that start in each role
    bool closes_call = true;   // the last launch of a call tells the peers that it is over
    bool record_trace = false;
    bool pull = false;         // receivers read rows from the owner instead of owners writing them

    protocol::ring_pool ring() const { return {ring_blocks, counters.freed, counters.freed_want}; }
    int64_t columns1() const { return (intermediate + column_block - 1) / column_block; }
    int64_t columns2() const { return (out_width + column_block - 1) / column_block; }
};

}  // namespace moe_tk::patterns
