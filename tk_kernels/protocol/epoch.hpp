// Epochs: the sequence number of a call. They only grow and wrap at 2^32, so they are compared by signed distance.
#pragma once

#include <cstdint>

namespace moe_tk::protocol {

// True if a counter that shows `seen` has come to `want` or past it; right as long as they are less than 2^31 apart.
constexpr bool reached(uint32_t seen, uint32_t want) { return int32_t(seen - want) >= 0; }

static_assert(reached(7, 7) && reached(8, 7) && !reached(6, 7));
static_assert(reached(2, 0xffff'fffeu) && !reached(0xffff'fffeu, 2), "must hold across the wrap");

}  // namespace moe_tk::protocol
