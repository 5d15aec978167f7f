// GEMM-scatter: tiles are computed, and each source token's partial row goes home as soon as its last tile is done.
// GEMM+combine (EP), GEMM+RS (TP and dense): only the tables differ.
#pragma once

#include "stages.hpp"

namespace moe_tk::patterns {

// after_gather: the rows come from a gather-GEMM of the same call, so the gate looks at its row-block counters.
template <class T, class Wire>
launch_result gemm_scatter(const launch_globals &g, bool after_gather) {
    constexpr roles::no_stage none;
    if (after_gather) {
        const auto stage = linear2<T, hooks::counter_gate>(g, {g.counters.l1_done, g.counters.l1_want});
        return launch<T, Wire, hooks::push_rows, false, true>(g, none, stage);
    }
    return launch<T, Wire, hooks::push_rows, false, true>(g, none, linear2<T, hooks::no_gate>(g, {}));
}

}  // namespace moe_tk::patterns
