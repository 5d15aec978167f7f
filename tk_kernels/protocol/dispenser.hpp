// Hands out the items 0..num_items-1 of a list to whichever block asks next. Blocks that finished one role join the next
// by asking its dispenser, so nobody idles while work is left and nobody needs to know who else is at work.
#pragma once

#include <cstdint>

#include "../platform/platform.hpp"

namespace moe_tk::protocol {

struct dispenser {
    uint32_t next_item = 0;

    // Next item, or any value >= num_items when the list is used up.
    MOE_TK_FN uint32_t take() { return platform::fetch_add_acq_rel<platform::scope::device>(&next_item, 1u); }
};

}  // namespace moe_tk::protocol
