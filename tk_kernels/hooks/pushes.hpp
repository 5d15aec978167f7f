// Pushes: what a block calls when its tile is written.
#pragma once

#include "gates.hpp"

namespace moe_tk::hooks {

struct no_push {
    struct params {};
    static void publish(const params &, const tile_task &) {}
};

// Counts finished column blocks of a row block.
// ORDER rows_ready: releases the tile to counter_gate::wait and to combine_jobs.
struct count_push {
    struct params { uint32_t *done; };  // [blocks]
    static void publish(const params &p, const tile_task &task) {
        protocol::count_ready(p.done + task.row_block, 1);
    }
};

}  // namespace moe_tk::hooks
