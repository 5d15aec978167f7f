// Gate and push of the fused layer's two GEMMs.
#pragma once

#include "../engine/tile_task.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

// ORDER rows_ready: acquires what the movers release, for all rows of the row block.
struct arrival_gate {
    static constexpr bool NOOP = false;
    struct params {
        call_view call;
        const uint32_t *arrived;  // [row blocks]
    };
    __device__ static void wait(const params &p, const tile_task &t) {
        spin_until(p.arrived + t.row_block, uint32_t(t.rows), p.call, {phase_id::gemm1, role_id::compute, t.row_block, p.call.rank});
        kittens::fence_proxy_async();  // visible to this thread -> to its TMA loads
    }
};

// ORDER tiles_ready: the storers have waited for their bytes and met; releases them to combine_job.
struct count_push {
    static constexpr bool NOOP = false;
    struct params { uint32_t *done; };  // [row blocks] finished column blocks
    __device__ static void publish(const params &p, const tile_task &t) { add_release_gpu(p.done + t.row_block, 1u); }
};

}  // namespace moe_tk::nvlink
