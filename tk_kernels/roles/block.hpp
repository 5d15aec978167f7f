// One block of a launch: its index, what it waited for, what it moved and (if asked) what it did when.
#pragma once

#include <cstdint>
#include <vector>

#include "../engine/host_tile.hpp"
#include "../patterns/globals.hpp"
#include "../platform/fault_points.hpp"

namespace moe_tk::roles {

using patterns::launch_globals;
using protocol::phase_id;
using protocol::role_id;
using protocol::scope;
using protocol::wait_site;

struct trace_event {
    int32_t block;
    int32_t phase;
    int32_t item;
    int32_t padding;
    uint64_t begin_ns, ready_ns, end_ns;  // ready: the wait was over
};

struct block_state {
    const launch_globals &globals;
    int block;
    std::vector<trace_event> trace;
    std::vector<int64_t> bytes_dispatched;  // [R] to or from each rank, over the wire
    std::vector<int64_t> bytes_combined;    // [R]
    uint64_t wait_ns[8] = {};               // by phase
    uint64_t busy_ns[8] = {};               // by phase
    engine::tile_scratch scratch;

    block_state(const launch_globals &g, int index)
        : globals(g), block(index), bytes_dispatched(size_t(g.heap.world)), bytes_combined(size_t(g.heap.world)) {}

    wait_site site(phase_id phase, role_id role, int64_t slot, int producer) const {
        return {globals.op, phase, role, globals.heap.rank, block, int32_t(slot), producer};
    }
};

// Times one item: construct, call ready() when its wait is over, destroy when it is done.
class item_timer {
  public:
    item_timer(block_state &state, phase_id phase, int64_t item)
        : state_(state), phase_(int(phase)), item_(item), begin_(platform::now_ns()), ready_(begin_) {
        MOE_TK_FAULT_POINT(phase)
    }
    void ready() {
        ready_ = platform::now_ns();
        MOE_TK_FAULT_POINT(phase_)
    }
    ~item_timer() {
        const uint64_t end = platform::now_ns();
        state_.wait_ns[phase_] += ready_ - begin_;
        state_.busy_ns[phase_] += end - ready_;
        if (state_.globals.record_trace) {
            state_.trace.push_back({state_.block, phase_, int32_t(item_), 0, begin_, ready_, end});
        }
    }

  private:
    block_state &state_;
    int phase_;
    int64_t item_;
    uint64_t begin_, ready_;
};

}  // namespace moe_tk::roles
