// Epochs: the sequence number of a call. They only grow and wrap at 2^32, so they are compared by signed distance. The
// current one lives in workspace memory, never in launch arguments: a launch with frozen arguments finds its own call.
#pragma once

#include <cstdint>

#include "../platform/platform.hpp"

namespace moe_tk::protocol {

// True if a counter that shows `seen` has come to `want` or past it; right as long as they are less than 2^31 apart.
MOE_TK_FN constexpr bool reached(uint32_t seen, uint32_t want) { return int32_t(seen - want) >= 0; }

static_assert(reached(7, 7) && reached(8, 7) && !reached(6, 7));
static_assert(reached(2, 0xffff'fffeu) && !reached(0xffff'fffeu, 2), "must hold across the wrap");

// A slot that nobody has written for 2^31 calls would seem to be ahead. Every REFRESH calls its owner rewrites it.
constexpr uint32_t REFRESH = 1u << 30;
MOE_TK_FN constexpr bool refreshes(uint32_t epoch) { return epoch % REFRESH == 0; }

}  // namespace moe_tk::protocol
