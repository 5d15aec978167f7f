// Gates: what a block calls before it reads a row block. Each waits in local memory, bounded, and returns false on abort.
#pragma once

#include "../protocol/ready.hpp"
#include "../roles/block.hpp"

namespace moe_tk::hooks {

struct tile_task {
    int64_t row_block, column_block, expert;
    int64_t first_row;  // ring row of its first row
    int rows;           // rows that carry data; the rest of the block is padding and never read
};

struct no_gate {
    struct params {};
    static bool wait(const params &, const tile_task &, const protocol::wait_context &, const protocol::wait_site &) { return true; }
};

// Waits until a counter of the row block has come to this call's value.
// ORDER rows_ready: acquires what place_rows counts (arrival) or what count_push counts (GEMM 1 to GEMM 2).
struct counter_gate {
    struct params { const uint32_t *counter, *want; };  // [blocks]
    static bool wait(const params &p, const tile_task &task, const protocol::wait_context &context,
                     const protocol::wait_site &site) {
        return protocol::wait_ready(p.counter + task.row_block, p.want[task.row_block], context, site);
    }
};

}  // namespace moe_tk::hooks
