// Role compute: takes tasks from the list, gates, multiplies, runs the epilogue, pushes. One stage per GEMM of the launch.
#pragma once

#include "../engine/host_tile.hpp"
#include "../hooks/epilogues.hpp"
#include "../hooks/gates.hpp"
#include "../hooks/pushes.hpp"
#include "../protocol/dispenser.hpp"
#include "block.hpp"

namespace moe_tk::roles {

using hooks::tile_task;

template <class T, class Gate, class Epilogue, class Push>
struct gemm_stage {
    phase_id phase;
    const T *rows;        // [ring rows, depth]
    int64_t depth;
    const T *weights;     // [E_local, WEIGHT_PANELS * columns, depth]
    int64_t columns;      // output columns
    typename Gate::params gate;
    typename Epilogue::params epilogue;
    typename Push::params push;

    bool run(block_state &state, const tile_task &task) const {
        const auto &g = state.globals;
        item_timer timer(state, phase, task.row_block);
        if (!Gate::wait(gate, task, g.wait, state.site(phase, role_id::compute, task.row_block, g.heap.rank))) return false;
        timer.ready();
        const int64_t column = task.column_block * g.column_block;
        const int width = int(std::min<int64_t>(g.column_block, columns - column));
        const int64_t band = (g.column_block + engine::PANEL - 1) / engine::PANEL * engine::PANEL;
        const int64_t acc_stride = band * Epilogue::WEIGHT_PANELS;
        auto &scratch = state.scratch;
        scratch.acc.resize(size_t(task.rows * acc_stride));
        engine::load_rows(rows + task.first_row * depth, depth, task.rows, depth, scratch);
        for (int panel = 0; panel < Epilogue::WEIGHT_PANELS; ++panel) {
            const T *weight = weights + ((task.expert * Epilogue::WEIGHT_PANELS + panel) * columns + column) * depth;
            engine::multiply(weight, depth, width, task.rows, depth, scratch, scratch.acc.data() + panel * band, acc_stride);
        }
        Epilogue::store(epilogue, task, scratch.acc.data(), acc_stride, band, column, width, task.row_block * g.schedule.row_block);
        Push::publish(push, task);
        protocol::note_progress(g.wait);
        return true;
    }
};

// A stage that a launch does not have.
struct no_stage {
    bool run(block_state &, const tile_task &) const { return true; }
};

// Tasks are taken in order, so whatever a taken task waits for has been taken before it or is fed by another role.
template <bool MIXED, class Stage1, class Stage2>
bool compute_tiles(block_state &state, protocol::dispenser &items, const Stage1 &stage1, const Stage2 &stage2) {
    const auto &g = state.globals;
    const auto &s = g.schedule;
    const auto ring = g.ring();
    for (int64_t item = items.take(); item < s.num_tasks; item = items.take()) {
        if (protocol::aborted(g.wait)) return false;
        const int32_t *task = s.tasks + item * 4;
        const int64_t block = task[2];
        const tile_task tile{block, task[3], s.block_group[block] % s.num_local_experts, ring.entry(block) * s.row_block,
                             s.block_target[block]};
        const bool second = MIXED ? task[0] == 1 : std::is_same_v<Stage1, no_stage>;
        if (!(second ? stage2.run(state, tile) : stage1.run(state, tile))) return false;
    }
    return true;
}

}  // namespace moe_tk::roles
