// Gate and push of the fused layer's two GEMMs.
#pragma once

#include "../engine/tile_task.cuh"
#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

// Waits of the loader thread before it loads a row block; both words are written by this GPU.
struct counter_wait {
    call_view call;
    const uint32_t *counter;  // [row blocks]
    // What is acquired becomes visible to this thread, then to its TMA loads.
    __device__ __forceinline__ bool ready(int row_block, uint32_t want) const {
        if (!protocol::reached(kittens::load_acquire_gpu(counter + row_block), want)) return false;
        kittens::fence_proxy_async_global();
        return true;
    }
    __device__ __forceinline__ void wait(int row_block, uint32_t want, phase_id phase) const {
        spin_until(counter + row_block, want, call, {phase, role_id::compute, row_block, call.rank});
        kittens::fence_proxy_async_global();
    }
};

// ORDER tiles_activated: acquires what count_push of GEMM 1 releases, for all column blocks of the row block. GEMM 2 may run
// beside the end of GEMM 1, and in bf16 writes where serial calls gather rows, which no fused call reads.
struct activated_gate {
    static constexpr bool NOOP = false;
    struct params {
        counter_wait done;
        uint32_t col_blocks;  // of GEMM 1
    };
    __device__ static bool ready(const params &p, const tile_task &t) { return p.done.ready(t.row_block, p.col_blocks); }
    __device__ static void wait(const params &p, const tile_task &t) { p.done.wait(t.row_block, p.col_blocks, phase_id::gemm2); }
};

// ORDER tiles_activated: GEMM 1's storers have waited for their bytes and met; releases them to activated_gate.
struct count_push {
    static constexpr bool NOOP = false;
    struct params { uint32_t *done; };  // [row blocks] finished column blocks
    __device__ static void publish(const params &p, const tile_task &t) {
        kittens::fence_proxy_async();  // bytes that TMA stored -> what this thread releases
        add_release_gpu(p.done + t.row_block, 1u);
    }
};

// ORDER tiles_ready: the same for GEMM 2, by column group; combine_jobs acquires.
struct group_push {
    static constexpr bool NOOP = false;
    struct params {
        uint32_t *done;  // [row blocks, MAX_COL_GROUPS] finished column blocks
        column_tiles tiles;
    };
    __device__ static void publish(const params &p, const tile_task &t) {
        kittens::fence_proxy_async();
        add_release_gpu(p.done + t.row_block * MAX_COL_GROUPS + p.tiles.group_of(t.col_block), 1u);
    }
};

}  // namespace moe_tk::nvlink
