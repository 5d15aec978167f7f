// Drives one rank through many calls as the Python side does: exchange, tables, launch, check.
#pragma once

#include <barrier>
#include <functional>
#include <mutex>
#include <string>

#include "rank.hpp"
#include "tk_kernels/patterns/gather_gemm.hpp"
#include "tk_kernels/patterns/gemm_scatter.hpp"
#include "tk_kernels/patterns/mega.hpp"
#include "tk_kernels/protocol/exchange.hpp"
#include "tk_kernels/protocol/wire.hpp"

namespace native {

struct options {
    std::string wire = "shm", pattern = "mega", network = "direct", scenario = "calls";
    mutant wrong = mutant::none;
    uint64_t seed = 1;
    int64_t calls = 100, first_call = 0;  // calls first_call ... first_call + calls
    int world = 3;
    uint32_t first_epoch = 0;
    double timeout_s = 20;
    bool pull = false, frozen = false;
    int delays = 8;
};

// The first failure of any rank, and how often what was checked.
class verdict {
  public:
    void fail(const std::string &kind, int rank, int64_t number, const std::string &what) {
        std::lock_guard hold(lock_);
        if (!kind_.empty() && kind_ != "told") return;  // a rank that was only told may get here before the one that knows
        kind_ = kind;
        text_ = "rank " + std::to_string(rank) + ", call " + std::to_string(number) + ": " + what;
    }
    void checked(int64_t count) { std::lock_guard hold(lock_); checked_ += count; }
    bool failed() { std::lock_guard hold(lock_); return !kind_.empty(); }
    std::string kind() const { return kind_; }
    std::string text() const { return text_; }
    int64_t checked() const { return checked_; }

  private:
    std::mutex lock_;
    std::string kind_, text_;
    int64_t checked_ = 0;
};

// What a test may do to one rank. A hook that returns false makes the rank leave without a word, as if it had died.
struct fault_hooks {
    std::function<bool(int rank, int64_t number)> may_open, may_launch;
};

enum class sizing { random, same, full, none };

template <class Wire, class Dispatch>
class driver {
  public:
    driver(const shape &s, const model &m, const options &o, rank_memory &memory, const std::vector<protocol::control_block *> &controls,
           std::barrier<> &rendezvous, verdict &result, const fault_hooks &hooks)
        : s_(s), m_(m), o_(o), memory_(memory), rendezvous_(rendezvous), result_(result), hooks_(hooks), rank_(memory.heap.rank) {
        context_.own = controls[size_t(rank_)];
        for (int r = 0; r < s.world; ++r) context_.peers[r] = controls[size_t(r)];
        context_.world = s.world;
        context_.rank = rank_;
        context_.timeout_ns = uint64_t(o.timeout_s * 1e9);
        context_.epoch_word = &memory.epoch;
        context_.record_claim = &memory.record_claim;
        context_.progress = memory.counters.progress;
        context_.last_forward_ns = memory.counters.last_forward_ns;
    }

    // All calls of this rank; stops at the first failure of any rank.
    void run() {
        if (o_.scenario == "idle") run_idle();
        else for (int64_t i = 0; i < o_.calls && call(o_.first_call + i, o_.frozen ? sizing::same : sizing::random);) ++i;
        rendezvous_.arrive_and_drop();
    }

    const protocol::wait_context &context() const { return context_; }
    protocol::wait_site site() const { return {protocol::op_id::moe_layer, protocol::phase_id::exchange, protocol::role_id::host, rank_}; }

    bool call(int64_t number, sizing sizes) {
        case_ = make_case(s_, o_.seed, uint64_t(number), sizes == sizing::same);
        if (sizes == sizing::full) std::fill(case_.route.counts.begin(), case_.route.counts.end(), s_.max_tokens), case_.empty = false;
        if (sizes == sizing::none) std::fill(case_.route.counts.begin(), case_.route.counts.end(), 0);
        memory_.poison_buffers(!o_.pull);
        random_pause();
        if (hooks_.may_open && !hooks_.may_open(rank_, number)) return false;
        if (!open(number)) return false;
        if (case_.empty) {
            protocol::arrive<Wire>(memory_.heap, protocol::call_epoch(context_));
            return true;
        }
        prepare();
        if (hooks_.may_launch && !hooks_.may_launch(rank_, number)) return false;
        if (!launch()) return stopped(number, "launch");
        if (!matches_oracle(s_, m_, case_, rank_, memory_.out.data())) return wrong(number, "the result differs from the plain loops");
        result_.checked(case_.route.counts[size_t(rank_)]);
        return true;
    }

  private:
    // Calls so far apart that a slot nobody wrote meanwhile looks like one from the future, unless it was refreshed on the way.
    void run_idle() {
        const uint32_t far = o_.first_epoch + (1u << 31) + 3;
        if (!call(0, sizing::full)) return;
        for (uint32_t step = protocol::REFRESH - o_.first_epoch % protocol::REFRESH; o_.wrong != mutant::skip_refresh && step < (1u << 31);
             step += protocol::REFRESH) {
            jump(o_.first_epoch + step);
            if (!call(1, sizing::none)) return;
        }
        jump(far);
        for (int64_t number = 2; number < 2 + o_.calls && call(number, sizing::full);) ++number;
    }

    void jump(uint32_t next) {
        rendezvous_.arrive_and_wait();
        memory_.set_epoch_flags(next - 1);
        rendezvous_.arrive_and_wait();
    }

    bool wrong(int64_t number, const std::string &what) {
        result_.fail("wrong_data", rank_, number, what);
        protocol::raise_abort(context_, protocol::abort_kind::host);
        return false;
    }

    bool stopped(int64_t number, const std::string &where) {
        static const char *const KINDS[] = {"none", "timeout", "peer_lost", "told", "fault"};
        protocol::wait_record record;
        std::string kind = "told", text = where;
        for (int look = 0; look < 20; ++look) {  // as the Python side does, while peers may still be writing theirs
            for (int from = 0; from < s_.world; ++from) {
                if (!protocol::read_record(context_.own, from, record) || from != rank_ || look > 0) continue;
                kind = KINDS[record.kind];
                text += ": phase " + std::to_string(int(record.site.phase)) + ", missing " + std::to_string(record.missing);
            }
            platform::nap_ns(500'000);
        }
        result_.fail(kind, rank_, number, text);
        return false;
    }

    protocol::call_header header(int rank, int64_t number) const {
        protocol::call_header h{};
        h.num_tokens = case_.route.counts[size_t(rank)];
        h.signature = uint64_t(number) * 1000 + uint64_t(rank);
        h.refused = case_.empty && number % s_.world == rank;
        std::snprintf(h.text, sizeof(h.text), "call %lld of rank %d", static_cast<long long>(number), rank);
        return h;
    }

    bool exchange(const protocol::call_header &mine, const protocol::routing_view &view) {
        const auto &heap = memory_.heap;
        if (o_.wrong == mutant::frozen_epoch) memory_.epoch = o_.first_epoch;  // as if it were a launch argument
        if (o_.wrong == mutant::no_barrier) {
            const uint32_t epoch = ++memory_.epoch;
            protocol::post_header<Wire>(heap, mine, view, epoch);
            return protocol::wait_for_all(heap, heap.offset.posted, epoch, context_, site());
        }
        if (o_.wrong == mutant::remote_poll) {
            for (int peer = 0; peer < s_.world; ++peer) {
                auto where = site();
                where.producer = peer;
                if (!protocol::spin_until(heap.done(peer, peer), memory_.epoch, context_, where)) return false;
            }
        }
        return protocol::exchange_headers<Wire>(heap, mine, view, context_, site());
    }

    // Opens the call and reads what the others said about it.
    bool open(int64_t number) {
        const int64_t first_pair = rank_ * s_.max_tokens * s_.top_k;
        const auto mine = header(rank_, number);
        const protocol::routing_view view{case_.route.ids.data() + first_pair, case_.route.weights.data() + first_pair, mine.num_tokens, s_.top_k};
        if (!exchange(mine, view)) return stopped(number, "exchange");
        seen_.ids.assign(case_.route.ids.size(), -1);
        seen_.weights.assign(case_.route.weights.size(), 0);
        seen_.counts.clear();
        for (int from = 0; from < s_.world; ++from) {
            random_pause();
            const auto want = header(from, number), &got = *memory_.heap.header(rank_, from);
            if (std::memcmp(&want, &got, sizeof(want)) != 0) return wrong(number, "the header of rank " + std::to_string(from) + " is from another call");
            seen_.counts.push_back(got.num_tokens);
            const int64_t pairs = got.refused ? 0 : got.num_tokens * s_.top_k, first = from * s_.max_tokens * s_.top_k;
            std::copy_n(memory_.heap.topk_ids(rank_, from, s_.top_k), pairs, seen_.ids.begin() + first);
            std::copy_n(memory_.heap.topk_weights(rank_, from, s_.top_k), pairs, seen_.weights.begin() + first);
            if (!std::equal(seen_.ids.begin() + first, seen_.ids.begin() + first + pairs, case_.route.ids.begin() + first)) {
                return wrong(number, "the routing of rank " + std::to_string(from) + " is from another call");
            }
        }
        return true;
    }

    void prepare() {
        tables fresh = build_tables(s_, seen_, rank_);
        const bool two = o_.pattern == "two_kernel";
        const int64_t columns = (s_.hidden + s_.column_block - 1) / s_.column_block;
        const int64_t blocks = std::max<int64_t>(1, fresh.num_blocks());
        // As moe_tk.memory.Geometry bounds them: a longer warm-up deadlocks on some routings.
        const int64_t extra = o_.wrong == mutant::long_warmup ? 0 : memory_.epoch % 4;
        const int64_t ring = two || o_.frozen ? blocks : std::min(blocks, 2 * fresh.largest_segment + extra);
        const int64_t longest = o_.wrong == mutant::long_warmup ? fresh.largest_segment : extra + 1;
        if (o_.wrong == mutant::early_election) {
            for (auto &count : fresh.chunk_expected) count -= count > 1;
            const int64_t jobs = s_.world * memory_.heap.job_chunks;
            std::copy_n(memory_.counters.job_want, jobs, memory_.counters.job_done);
        }
        if (two) order_for_one(fresh, columns);
        else order_for_mega(fresh, columns, columns, ring == blocks ? 2 : longest);
        const float *mine = case_.tokens.data() + rank_ * s_.max_tokens * s_.hidden;
        tokens_.assign(mine, mine + s_.max_tokens * s_.hidden);
        pair_weights_ = seen_.weights;
        if (!o_.frozen || !built_) {
            tables_ = std::move(fresh);
            globals_ = make_globals(ring);
            built_ = true;
        } else {
            refill(fresh);
        }
    }

    // New contents at the old addresses: the launch itself stays as it was.
    void refill(const tables &fresh) {
        const auto copy = [](const auto &from, auto &to) {
            if (from.size() != to.size()) throw std::logic_error("a frozen launch needs tables of the same size");
            std::copy(from.begin(), from.end(), to.begin());
        };
        copy(fresh.slots, tables_.slots), copy(fresh.slot_pair, tables_.slot_pair), copy(fresh.tasks, tables_.tasks);
        copy(fresh.delivery_order, tables_.delivery_order), copy(fresh.delivery_pos, tables_.delivery_pos);
        copy(fresh.block_target, tables_.block_target), copy(fresh.block_group, tables_.block_group);
        copy(fresh.job_order, tables_.job_order), copy(fresh.chunk_expected, tables_.chunk_expected);
        copy(fresh.send_order, tables_.send_order), copy(fresh.send_count, tables_.send_count);
        copy(fresh.contributors, tables_.contributors);
    }

    patterns::launch_globals make_globals(int64_t ring) {
        patterns::launch_globals g;
        g.heap = memory_.heap, g.wait = context_, g.op = protocol::op_id::moe_layer;
        g.schedule = tables_.view(s_, rank_), g.counters = memory_.counters;
        g.hidden = g.out_width = s_.hidden, g.intermediate = s_.intermediate;
        g.column_block = s_.column_block, g.send_chunk = s_.send_chunk, g.ring_blocks = ring;
        g.num_tokens = case_.route.counts[size_t(rank_)];
        g.tokens = tokens_.data(), g.gathered = memory_.gathered.data(), g.activated = memory_.activated.data();
        g.w13 = m_.w13.data() + s_.first_expert(rank_) * 2 * s_.intermediate * s_.hidden;
        g.w2 = m_.w2.data() + s_.first_expert(rank_) * s_.intermediate * s_.hidden;
        g.expert_out = memory_.expert_out.data(), g.out = memory_.out.data(), g.pair_weights = pair_weights_.data();
        g.weights_before_l2 = case_.weights_before_l2;
        const auto blocks = [&](int bit) { return 1 + int(memory_.epoch >> bit & 1); };  // in every combination, call by call
        g.num_send = 1, g.num_place = blocks(0), g.num_compute = blocks(1), g.num_combine = blocks(2);
        g.pull = o_.pull;
        return g;
    }

    bool launch() {
        if (o_.pattern == "mega") return done(patterns::mega<float, Wire, Dispatch>(globals_));
        globals_.closes_call = false;
        if (!done(patterns::gather_gemm<float, Wire, Dispatch>(globals_, true))) return false;
        globals_.closes_call = true;
        return done(patterns::gemm_scatter<float, Wire>(globals_, true));
    }

    bool done(const patterns::launch_result &result) {
        if (!result.fault.empty()) result_.fail("fault", rank_, -1, result.fault);
        return result.ok;
    }

    const shape &s_;
    const model &m_;
    const options &o_;
    rank_memory &memory_;
    std::barrier<> &rendezvous_;
    verdict &result_;
    const fault_hooks &hooks_;
    const int rank_;
    protocol::wait_context context_;
    call_case case_;
    routing seen_;
    tables tables_;
    std::vector<float> tokens_, pair_weights_;
    patterns::launch_globals globals_;
    bool built_ = false;
};

}  // namespace native
