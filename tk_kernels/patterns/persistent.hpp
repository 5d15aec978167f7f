// The persistent launch that every pattern instantiates. Blocks are threads here.
//
// Role map: a block starts in one role and, when that role's list is used up, joins the next one down the line:
//     send -> place -> compute -> combine -> reduce
// Every role that the pattern has gets at least one block that starts in it, so each stage is fed by a block that no later
// stage can occupy; a wait can only be for an earlier stage, for the ring (fed by combine), or for another rank.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../hooks/dispatch.hpp"
#include "../protocol/barrier.hpp"
#include "../protocol/dispenser.hpp"
#include "../roles/combine_jobs.hpp"
#include "../roles/compute_tiles.hpp"
#include "../roles/place_rows.hpp"
#include "../roles/reduce_rows.hpp"
#include "../roles/send_rows.hpp"

namespace moe_tk::patterns {

struct launch_result {
    bool ok = true;
    std::string fault;  // a block threw (out of memory): its text
    std::vector<int64_t> bytes_dispatched, bytes_combined;  // [R]
    uint64_t wait_ns[8] = {}, busy_ns[8] = {};              // by phase, summed over the blocks
    std::vector<roles::trace_event> trace;
};

struct role_lists {
    protocol::dispenser send, place, compute, combine, reduce;
};

// Moves the wanted values of the counters on by what this launch adds. Single-threaded, before any block starts.
template <bool GATHER, bool SCATTER>
void advance_wants(const launch_globals &g) {
    const auto &s = g.schedule;
    const auto &c = g.counters;
    for (int64_t b = 0; b < s.num_blocks; ++b) {
        if constexpr (GATHER) {
            c.arrived_want[b] += uint32_t(s.block_target[b]);
            c.l1_want[b] += uint32_t(g.columns1());
        }
        if constexpr (SCATTER) {
            c.l2_want[b] += uint32_t(g.columns2());
            c.freed_want[b] += uint32_t(s.block_target[b]);
        }
    }
    if constexpr (SCATTER) {
        for (int r = 0; r < g.heap.world; ++r) {
            for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {
                c.job_want[r * g.heap.job_chunks + chunk] += uint32_t(s.chunk_expected[r * s.num_chunks + chunk]);
            }
        }
    }
}

template <class T, class Wire, class Dispatch, bool GATHER, bool SCATTER, class Stage1, class Stage2>
bool walk_roles(roles::block_state &state, role_lists &lists, protocol::role_id first, const Stage1 &stage1, const Stage2 &stage2) {
    using protocol::role_id;
    if constexpr (GATHER) {
        if (first <= role_id::send && !roles::send_rows<T, Wire, Dispatch>(state, lists.send)) return false;
        if (first <= role_id::place && !roles::place_rows<T, Dispatch>(state, lists.place)) return false;
    }
    if (first <= role_id::compute && !roles::compute_tiles<GATHER && SCATTER>(state, lists.compute, stage1, stage2)) return false;
    if constexpr (SCATTER) {
        if (!roles::combine_jobs<T, Wire>(state, lists.combine)) return false;
        if (!roles::reduce_rows<T, Wire>(state, lists.reduce)) return false;
    }
    return true;
}

template <bool GATHER, bool SCATTER>
std::vector<protocol::role_id> starting_roles(const launch_globals &g) {
    using protocol::role_id;
    std::vector<role_id> first;
    const auto add = [&](role_id role, int count) { first.insert(first.end(), size_t(count < 1 ? 1 : count), role); };
    if constexpr (GATHER) {
        add(role_id::send, g.num_send);
        add(role_id::place, g.num_place);
    }
    add(role_id::compute, g.num_compute);
    if constexpr (SCATTER) add(role_id::combine, g.num_combine);
    return first;
}

inline void collect(launch_result &result, const roles::block_state &state) {
    for (size_t r = 0; r < state.bytes_dispatched.size(); ++r) {
        result.bytes_dispatched[r] += state.bytes_dispatched[r];
        result.bytes_combined[r] += state.bytes_combined[r];
    }
    for (int phase = 0; phase < 8; ++phase) {
        result.wait_ns[phase] += state.wait_ns[phase];
        result.busy_ns[phase] += state.busy_ns[phase];
    }
    result.trace.insert(result.trace.end(), state.trace.begin(), state.trace.end());
}

template <class T, class Wire, class Dispatch, bool GATHER, bool SCATTER, class Stage1, class Stage2>
launch_result launch(launch_globals g, const Stage1 &stage1, const Stage2 &stage2) {
    advance_wants<GATHER, SCATTER>(g);
    role_lists lists;
    const auto first = starting_roles<GATHER, SCATTER>(g);
    std::vector<protocol::wait_record> block_records(first.size());
    g.wait.block_records = block_records.data();
    g.wait.num_blocks = int(first.size());
    std::vector<roles::block_state> states;
    states.reserve(first.size());
    for (size_t block = 0; block < first.size(); ++block) states.emplace_back(g, int(block));
    std::vector<char> ok(first.size(), 0);
    std::vector<std::string> faults(first.size());
    const auto run_block = [&](size_t block) {
        try {
            ok[block] = walk_roles<T, Wire, Dispatch, GATHER, SCATTER>(states[block], lists, first[block], stage1, stage2);
        } catch (const std::exception &error) {
            faults[block] = error.what();
            protocol::raise_abort(g.wait, protocol::abort_kind::host);
        }
    };
    std::vector<std::thread> threads;
    threads.reserve(first.size());
    try {
        for (size_t block = 1; block < first.size(); ++block) threads.emplace_back(run_block, block);
    } catch (const std::system_error &error) {  // no more threads: the blocks that did start must not wait for the others
        faults[threads.size() + 1] = std::string("cannot start a block: ") + error.what();
        protocol::raise_abort(g.wait, protocol::abort_kind::host);
    }
    run_block(0);
    for (auto &thread : threads) thread.join();

    launch_result result;
    result.bytes_dispatched.resize(size_t(g.heap.world));
    result.bytes_combined.resize(size_t(g.heap.world));
    for (size_t block = 0; block < first.size(); ++block) {
        result.ok = result.ok && ok[block];
        if (result.fault.empty()) result.fault = faults[block];
        collect(result, states[block]);
    }
    // Once anybody has given up nobody hands out a result: also not a rank that was frozen and found all it needed afterwards.
    if (protocol::aborted(g.wait)) result.ok = false;
    if (!result.ok && result.fault.empty()) protocol::close_record(g.wait, g.op);
    if (result.ok && g.closes_call) protocol::arrive<Wire>(g.heap, protocol::call_epoch(g.wait));
    return result;
}

}  // namespace moe_tk::patterns
