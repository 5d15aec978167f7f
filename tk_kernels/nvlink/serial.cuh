// The serial pattern's own two kernels: all multiprocessors move rows, then (after two plain GEMMs) all combine. The roles are
// those of the fused templates; only their number differs. Everything that a rank shows to others is the same, so a rank that
// runs this pattern and one that runs the fused one can meet in a call.
#pragma once

#include "combine.cuh"
#include "pull_rows.cuh"

namespace moe_tk::nvlink {

// A mover has LOADS x PIECE_BYTES on their way: 8 in each of 132 blocks keep 10 MiB in flight, twice of what HBM needs.
constexpr int PULL_WARPS = 8;
struct pull_all_shared { pull_shared warps[PULL_WARPS]; };
static_assert(sizeof(pull_all_shared) <= kittens::MAX_SHARED_MEMORY, "rings of all movers exceed shared memory: lower PULL_WARPS");

// Roles: every warp is a mover. Slots come from the dispenser, so any number of blocks does the work, and none waits for another.
__global__ __launch_bounds__(PULL_WARPS * 32, 1) void pull_all(const __grid_constant__ call_view c, const __grid_constant__ pull_params p) {
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    pull_shared &s = reinterpret_cast<pull_all_shared *>(dynamic_shared)->warps[kittens::warpid()];
    if (kittens::laneid() == 0) {
        init_pull(s);
        kittens::fence_semaphore_init();
    }
    __syncwarp();
    kittens::wait_prerequisite_grids();  // the tables
    row_puller(c, p, s).run();
}

// Roles: every warp combines jobs, then reduces own tokens. Nobody waits before the jobs are used up, so blocks that start late
// are waited for by nobody.
constexpr int COMBINE_THREADS = 640;  // 96 registers each without spills
__global__ __launch_bounds__(COMBINE_THREADS, 1) void combine_all(const __grid_constant__ call_view c,
                                                                 const __grid_constant__ combine_params p) {
    combine_and_reduce(c, p);
}

}  // namespace moe_tk::nvlink
