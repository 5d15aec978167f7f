// Chunk watermarks: "all partial rows of this chunk of yours that I owe you have been delivered". One word per (sending
// rank, chunk) at the receiver. A wire without remote counters elects the last local writer, who stores the epoch; a wire
// with them lets every writer count itself, and the receiver knows from its own tables how many there are.
#pragma once

#include <cstdint>

#include "election.hpp"
#include "heap.hpp"
#include "wait.hpp"

namespace moe_tk::protocol {

// Called after each put of a partial row for (source, chunk). done, want: local counters of that chunk.
// ORDER chunk_combined: releases to wait_chunk on the source rank.
template <class Wire>
MOE_TK_FN void publish_job(const symmetric_heap &heap, int source, int64_t chunk, uint32_t *done, uint32_t want, uint32_t epoch) {
    uint32_t *word = heap.combined(source, heap.rank, chunk);
    if constexpr (Wire::COUNTS) Wire::count(word, 1);
    else if (elect_last(done, 1, want)) Wire::signal(word, epoch);
}

// Waits until rank `from` has delivered its `owed` (> 0) rows of this chunk. received_want: local, per (rank, chunk), moved on
// here by the one waiter of a chunk; used by wires that count, null otherwise.
// ORDER chunk_combined: acquires what publish_job releases.
template <class Wire>
MOE_TK_FN bool wait_chunk(const symmetric_heap &heap, int from, int64_t chunk, uint32_t owed, uint32_t *received_want,
                          const wait_context &context, wait_site site) {
    const uint32_t *word = heap.combined(heap.rank, from, chunk);
    uint32_t want = call_epoch(context);
    if constexpr (Wire::COUNTS) want = received_want[from * heap.job_chunks + chunk] += owed;
    site.slot = int32_t(chunk);
    site.producer = from;
    return spin_until(word, want, context, site);
}

}  // namespace moe_tk::protocol
