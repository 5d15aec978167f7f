// Memory of one rank of a test world: the heap that peers write into, the counters, the work buffers.
#pragma once

#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "cases.hpp"
#include "tk_kernels/protocol/barrier.hpp"

namespace native {

using namespace moe_tk;

// Ways in which a copy of the protocol can be wrong. Each must be found by a test.
enum class mutant { none, early_election, frozen_epoch, no_barrier, remote_poll, ring_ignored, long_warmup, skip_refresh };

inline protocol::heap_regions lay_out(const shape &s, int64_t &size) {
    protocol::heap_regions at;
    const auto take = [&](int64_t bytes) {
        const int64_t begin = size;
        size = (size + bytes + 255) / 256 * 256;
        return begin;
    };
    const int64_t flags = s.world * protocol::FLAG_LINE * 4, rows = s.world * s.max_tokens;
    at.control = take(sizeof(protocol::control_block));
    at.header = take(s.world * int64_t(sizeof(protocol::call_header)));
    at.posted = take(flags);
    at.done = take(flags);
    at.topk_ids = take(rows * s.top_k * 4);
    at.topk_weights = take(rows * s.top_k * 4);
    at.sent = take(s.world * s.chunks_of(s.send_chunk) * 4);
    at.arrivals = take(rows * s.hidden * 4);
    at.combined = take(s.world * s.chunks_of(s.job_chunk) * 4);
    at.planes = take(rows * s.hidden * 4);
    return at;
}

struct free_memory {
    void operator()(char *at) const { std::free(at); }
};
using heap_block = std::unique_ptr<char, free_memory>;

inline heap_block zeroed_block(int64_t size) {
    char *at = static_cast<char *>(std::aligned_alloc(256, size_t(size)));
    if (!at) throw std::bad_alloc();
    std::memset(at, 0, size_t(size));
    return heap_block(at);
}

inline void poison(float *at, int64_t count) { std::fill_n(at, count, std::numeric_limits<float>::quiet_NaN()); }

class rank_memory {
  public:
    protocol::symmetric_heap heap;  // bases are filled by the world
    heap_block block;
    int64_t heap_bytes = 0;
    patterns::local_counters counters;
    uint32_t epoch, record_claim = 0, progress = 0;
    uint64_t last_forward_ns = 0;
    std::vector<float> gathered, activated, expert_out, out;

    // All epochs and counters start at first_epoch, so that a test can start near the wrap.
    rank_memory(const shape &s, int rank, uint32_t first_epoch, bool counts, mutant wrong) : epoch(first_epoch), shape_(s) {
        heap.offset = lay_out(s, heap_bytes);
        heap.world = s.world;
        heap.rank = rank;
        heap.max_tokens = s.max_tokens;
        heap.send_chunks = s.chunks_of(s.send_chunk);
        heap.job_chunks = s.chunks_of(s.job_chunk);
        block = zeroed_block(heap_bytes);
        heap.base[rank] = block.get();
        set_epoch_flags(first_epoch);
        std::fill_n(heap.sent(rank, 0, 0), s.world * heap.send_chunks, first_epoch);
        std::fill_n(heap.combined(rank, 0, 0), s.world * heap.job_chunks, counts ? first_epoch + 77 : first_epoch);
        make_counters(first_epoch + 77, wrong);
        const int64_t rows = s.max_blocks() * s.row_block;
        gathered.resize(size_t(rows * s.hidden));
        activated.resize(size_t(rows * s.intermediate));
        expert_out.resize(size_t(rows * s.hidden));
        out.resize(size_t(s.max_tokens * s.hidden));
    }

    // Only while no call is under way anywhere.
    void set_epoch_flags(uint32_t value) {
        epoch = value;
        for (int from = 0; from < heap.world; ++from) *heap.posted(heap.rank, from) = *heap.done(heap.rank, from) = value;
    }

    // What this call does not write itself must not matter. Between this rank's arrive() and its next header nobody writes here.
    void poison_buffers(bool arrivals) {
        for (auto *buffer : {&gathered, &activated, &expert_out, &out}) poison(buffer->data(), int64_t(buffer->size()));
        const int64_t rows = heap.world * shape_.max_tokens * shape_.hidden;
        if (arrivals) poison(heap.arrivals<float>(heap.rank, 0, 0, shape_.hidden), rows);
        poison(heap.planes<float>(heap.rank, 0, 0, shape_.hidden), rows);
    }

  private:
    shape shape_;
    std::vector<std::vector<uint32_t>> counter_memory_;

    uint32_t *counter(int64_t count, uint32_t start) {
        counter_memory_.emplace_back(size_t(count), start);
        return counter_memory_.back().data();
    }

    void make_counters(uint32_t start, mutant wrong) {
        const int64_t blocks = shape_.max_blocks(), jobs = heap.world * heap.job_chunks;
        auto &c = counters;
        c.arrived = counter(blocks, start), c.arrived_want = counter(blocks, start);
        c.l1_done = counter(blocks, start), c.l1_want = counter(blocks, start);
        c.l2_done = counter(blocks, start), c.l2_want = counter(blocks, start);
        c.freed = counter(blocks, wrong == mutant::ring_ignored ? start + (1u << 30) : start);
        c.freed_want = counter(blocks, start);
        c.job_done = counter(jobs, start);
        c.job_want = counter(jobs, start);
        c.received_want = counter(jobs, start);
        c.progress = &progress;
        c.last_forward_ns = &last_forward_ns;
    }
};

}  // namespace native
