// The serial pattern's last kernel: all multiprocessors combine. What a rank shows to others is the same as in the fused pattern, so
// ranks that run one and ranks that run the other can meet in a call.
#pragma once

#include "combine.cuh"

namespace moe_tk::nvlink {

// Roles: every warp takes from the list of jobs and own tokens. A job waits for nothing here, and the jobs of a group stand before
// its tokens, so blocks that start late are waited for by nobody.
constexpr int COMBINE_THREADS = 640, COMBINE_BATCH = 4;
__global__ __launch_bounds__(COMBINE_THREADS, 1) void combine_all(const __grid_constant__ call_view c,
                                                                 const __grid_constant__ combine_params p) {
    stamps_off();
    combine_and_reduce<COMBINE_BATCH, false>(c, p);
}

}  // namespace moe_tk::nvlink
