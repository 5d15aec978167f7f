// The ring pool: row block b lives in entry b % num_entries, in generation b / num_entries. A block may be filled once the
// block one generation earlier has been freed; `freed` counts, over all epochs, the rows whose jobs are combined.
#pragma once

#include <cstdint>

#include "wait.hpp"

namespace moe_tk::protocol {

struct ring_pool {
    int64_t num_entries;          // row blocks that are held at a time
    const uint32_t *freed;        // [blocks] rows of the block whose job has been combined
    const uint32_t *freed_want;   // [blocks] its value when all rows of this epoch are

    int64_t entry(int64_t block) const { return block % num_entries; }

    // ORDER ring_free: acquires what combine_jobs releases after it has read the last row of the earlier generation.
    bool wait_free(int64_t block, const wait_context &context, wait_site site) const {
        const int64_t before = block - num_entries;
        if (before < 0) return true;
        site.slot = int32_t(before);
        site.producer = context.rank;
        return spin_until(freed + before, freed_want[before], context, site);
    }
};

}  // namespace moe_tk::protocol
