// Election: of several local writers the last one, found by a local counter, publishes for all. The counters count over
// all epochs and are never reset; `want` is moved on by the launch before its blocks start.
#pragma once

#include <cstdint>

#include "../platform/platform.hpp"

namespace moe_tk::protocol {

// Adds `count` to a local counter; true for the one whose addition completes it.
// ORDER elect: acq_rel, so that the elected one has seen the writes of all others before it speaks for them.
MOE_TK_FN bool elect_last(uint32_t *counter, uint32_t count, uint32_t want) {
    return platform::fetch_add_acq_rel<platform::scope::device>(counter, count) + count == want;
}

}  // namespace moe_tk::protocol
