// gather-GEMM: rows arrive from all ranks and are multiplied as soon as their row block is complete.
// dispatch+GEMM (EP) and AG+GEMM (TP) with the SwiGLU epilogue, dense AG+GEMM with none: only the tables differ.
#pragma once

#include "stages.hpp"

namespace moe_tk::patterns {

template <class T, class Wire, class Dispatch>
launch_result gather_gemm(const launch_globals &g, bool gated) {
    constexpr roles::no_stage none;
    if (gated) return launch<T, Wire, Dispatch, true, false>(g, gated_linear1<T>(g), none);
    return launch<T, Wire, Dispatch, true, false>(g, plain_linear1<T>(g), none);
}

}  // namespace moe_tk::patterns
