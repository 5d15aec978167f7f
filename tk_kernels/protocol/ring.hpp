// The ring pool: row block b lives in entry b % num_entries, in generation b / num_entries. A block may be filled once the
// block one generation earlier has been freed; `freed` counts, over all epochs, the rows whose jobs are combined.
#pragma once

#include <cstdint>

#include "wait.hpp"

namespace moe_tk::protocol {

struct ring_pool {
    int64_t num_entries;          // row blocks that are held at a time
    uint32_t *freed;              // [blocks] rows of the block whose job has been combined
    const uint32_t *freed_want;   // [blocks] its value when all rows of this epoch are

    MOE_TK_FN int64_t entry(int64_t block) const { return block % num_entries; }

    // One row of the block is needed no more. ORDER ring_free: releases to wait_free.
    MOE_TK_FN void free_row(int64_t block) const { platform::fetch_add_acq_rel<scope::device>(freed + block, 1u); }

    // ORDER ring_free: acquires what free_row releases after the last row of the earlier generation has been read.
    MOE_TK_FN bool wait_free(int64_t block, const wait_context &context, wait_site site) const {
        const int64_t before = block - num_entries;
        if (before < 0) return true;
        site.slot = int32_t(before);
        site.producer = context.rank;
        return spin_until<scope::device>(freed + before, freed_want[before], context, site);
    }
};

}  // namespace moe_tk::protocol
