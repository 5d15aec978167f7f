// One rank misbehaves in the middle of a run; all others must end in time and say who was missing.
//   late        comes later than the limit: the others time out and name it, it is told when it comes
//   lost        leaves between exchange and launch; the liveness watch notes it: the others say peer_lost at once
//   throws      a block of one rank throws: every rank ends, the fault's text comes back
//   half_abort  dies after it told one rank of three: that one passes it on
#pragma once

#include <stdexcept>

#include "world.hpp"

namespace native {

constexpr int64_t FAULT_CALL = 3;

inline std::atomic<int> sends_until_throw{0};

struct throwing_push : hooks::push_rows {
    template <class T, class Wire>
    static void send(roles::block_state &state, int64_t item) {
        if (sends_until_throw.fetch_sub(1) == 1) throw std::runtime_error("injected");
        hooks::push_rows::send<T, Wire>(state, item);
    }
};

// The lowest of the calls from FAULT_CALL on that launch something and in which every rank has rows for every other.
inline int64_t full_call(const shape &s, const options &o) {
    for (int64_t number = FAULT_CALL;; ++number) {
        const auto c = make_case(s, o.seed, uint64_t(number), false);
        bool full = !c.empty;
        for (int rank = 0; rank < s.world && full; ++rank) {
            tables t = build_tables(s, c.route, rank);
            for (const int32_t count : t.send_count) full = full && count > 0;
        }
        if (full) return number;
    }
}

inline std::string check_record(rank_memory &memory, uint32_t kind, uint64_t missing) {
    protocol::wait_record record;
    const int rank = memory.heap.rank;
    const std::string who = "rank " + std::to_string(rank) + ": ";
    if (!protocol::read_record(memory.heap.control(rank), rank, record)) return who + "filed no record";
    if (record.site.rank != rank || record.site.op != protocol::op_id::moe_layer || record.epoch != memory.epoch) return who + "a record of another call";
    if (record.kind == uint32_t(protocol::abort_kind::told_by_peer)) return "";  // somebody else was faster
    if (record.kind != kind) return who + "kind is " + std::to_string(record.kind);
    if ((record.missing & missing) == 0 && record.site.producer != rank) return who + "missing is " + std::to_string(record.missing);
    return "";
}

// What must be in the records once all survivors have ended.
inline std::string check_end(const options &o, std::vector<std::unique_ptr<rank_memory>> &memories, int culprit, double seconds) {
    using protocol::abort_kind;
    const bool lost = o.scenario == "lost";
    const double limit = o.scenario == "late" ? o.timeout_s + 2 : 5;
    if (seconds > limit) return "ended after " + std::to_string(seconds) + " s";
    int speakers = 0;
    for (auto &memory : memories) {
        auto *own = memory->heap.control(memory->heap.rank);
        if (memory->heap.rank == culprit) continue;
        if (platform::load_acquire<platform::scope::system>(&own->abort_flag) == 0) return "a rank was never told";
        if (o.scenario == "throws" || o.scenario == "half_abort") continue;
        const auto kind = uint32_t(lost ? abort_kind::peer_lost : abort_kind::timeout);
        const std::string problem = check_record(*memory, kind, 1ull << culprit);
        if (!problem.empty()) return problem;
        protocol::wait_record record;
        speakers += protocol::read_record(own, memory->heap.rank, record) && record.kind == kind;
    }
    return speakers == 0 && (lost || o.scenario == "late") ? "nobody named the missing rank" : "";
}

inline int run_fault(const options &o) {
    const shape s = shape_of(o);
    auto memories = make_memories<protocol::shm_wire>(s, o);
    verdict result;
    fault_hooks hooks;
    const int64_t at = full_call(s, o);
    const int culprit = 0;
    std::atomic<uint64_t> begin{0};
    const auto acts = [&](int rank, int64_t number) {
        if (rank != culprit || number != at) return false;
        begin = platform::now_ns();
        return true;
    };
    if (o.scenario == "late") {
        hooks.may_open = [&](int rank, int64_t number) {
            if (acts(rank, number)) std::this_thread::sleep_for(std::chrono::duration<double>(o.timeout_s + 1));
            return true;
        };
    } else if (o.scenario == "throws") {
        hooks.may_launch = [&](int rank, int64_t number) {
            if (acts(rank, number)) sends_until_throw = 1;
            return true;
        };
    } else {
        hooks.may_launch = [&](int rank, int64_t number) {
            if (!acts(rank, number)) return true;
            if (o.scenario == "lost") {
                for (auto &memory : memories) {
                    auto *own = memory->heap.control(memory->heap.rank);
                    platform::store_release<platform::scope::system>(&own->lost_ranks, uint64_t(1) << culprit);
                }
            } else {
                platform::store_release<platform::scope::system>(&memories[1]->heap.control(1)->abort_flag, 3u);
            }
            return false;
        };
    }
    run_ranks<protocol::shm_wire, throwing_push>(s, o, memories, result, hooks);
    const double seconds = double(platform::now_ns() - begin.load()) * 1e-9;
    const std::string problem = begin == 0 ? "the fault never came" : check_end(o, memories, culprit, seconds);
    if (problem.empty()) return report(o, result, ", \"problem\": \"\", \"seconds\": " + std::to_string(seconds)), 0;
    return report(o, result, ", \"problem\": \"" + problem + "\""), 1;
}

}  // namespace native
