// mega: the whole layer in one launch. The task list interleaves the two GEMMs: Linear 2 of a row block comes `warmup` row
// blocks after its Linear 1, so that its gate hardly ever waits; the ring pool bounds what is alive in between.
#pragma once

#include "stages.hpp"

namespace moe_tk::patterns {

template <class T, class Wire, class Dispatch>
launch_result mega(const launch_globals &g) {
    const auto stage2 = linear2<T, hooks::counter_gate>(g, {g.counters.l1_done, g.counters.l1_want});
    return launch<T, Wire, Dispatch, true, true>(g, gated_linear1<T>(g), stage2);
}

}  // namespace moe_tk::patterns
