// The two persistent templates of the fused layer: the engine's grouped GEMM with one more role in its spare warp.
#pragma once

#include "../engine/grouped_gemm.cuh"
#include "../hooks/epilogue.cuh"
#include "../hooks/noop.cuh"
#include "combine.cuh"
#include "gather_rows.cuh"
#include "hooks.cuh"

namespace moe_tk::nvlink {

// Registers for the fourth warp of the producer warpgroup, which does more here than in the plain GEMM; consumers get the rest.
// A block has what it got at launch, LAUNCH_REGISTERS x NUM_THREADS: asking for one more would wait for ever.
template <class Base, int PRODUCER = Base::CONSUMER_WGS == 1 ? 120 : 88> struct fused_config : Base {
    static constexpr int LAUNCH_REGISTERS = Base::CONSUMER_WGS == 1 ? 240 : 168;  // of a thread, as ptxas says
    static constexpr int REST = (LAUNCH_REGISTERS * (Base::CONSUMER_WGS + 1) - PRODUCER) / Base::CONSUMER_WGS / 8 * 8;
    static constexpr int PRODUCER_REGISTERS = PRODUCER, CONSUMER_REGISTERS = REST < 240 ? REST : 240;
    static constexpr bool TILED_WEIGHTS = true;
};

// What the spare warps of the layer's GEMM 2 do.
struct combine_finish {
    using gate = activated_gate;
    using push = group_push;
    using params = combine_params;
    // BATCH: as many rows in flight as the registers of the warp allow.
    template <int BATCH> __device__ static void run(const call_view &c, const params &p) { combine_and_reduce<BATCH>(c, p); }
};

template <class Cfg, class Source>
using gather_shared = gemm_shared<Cfg, typename Cfg::T, typename Source::shared>;  // SwiGLU leaves what GEMM 2 takes
template <class Cfg, class Source> constexpr int gather_shared_bytes() {
    static_assert(sizeof(gather_shared<Cfg, Source>) <= kittens::MAX_SHARED_MEMORY, "stages, outputs and the source's part exceed shared memory");
    return int(sizeof(gather_shared<Cfg, Source>));
}

// Globals of gather_gemm, if its rows lie in one tensor and its weights in the kernels' order.
template <class Cfg, class Epilogue, class Source> using gather_globals = gemm_globals<Cfg, typename Source::gate, Epilogue, typename Source::push>;

// gather-GEMM. Roles: consumer warpgroups; then a loader warp, one storer warp per consumer warpgroup, and one more warp. The source
// says where rows come from: either it loads (LOADS), with the loader and the last warp, or TMA does, behind a gate, and the last
// warp moves rows. It says too who hears of finished tiles.
template <class Cfg, class Epilogue, class Source, class Globals = gather_globals<Cfg, Epilogue, Source>>
__global__ __launch_bounds__(Cfg::NUM_THREADS, 1) void gather_gemm(
    const __grid_constant__ Globals g, const __grid_constant__ typename Source::params p) {
    static_assert(Cfg::CONSUMER_WGS <= 2, "loaders and storers fill one warpgroup");
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    auto &s = *reinterpret_cast<gather_shared<Cfg, Source> *>(dynamic_shared);
    const int warp = kittens::warpid(), rank = Cfg::CLUSTER == 1 ? 0 : kittens::cluster_ctarank();
    const int num_k_blocks = kittens::ceil_div(int(g.tokens.cols), Cfg::BLOCK_K);
    stamps_begin(g.gate.call, stamp_kernel::gather_gemm);
    if (threadIdx.x == 0) {
        Source::init(s.more);
        init_semaphores<Cfg>(s);
        kittens::tma::prefetch_descriptor(&g.weights.tma_maps[0]);
        kittens::tma::prefetch_descriptor(&g.out.tma_maps[0]);
    }
    if constexpr (Cfg::CLUSTER > 1) kittens::cluster_sync();
    else __syncthreads();
    kittens::wait_prerequisite_grids();    // the tables, and what they speak of
    stamp_lap_warp(stamp_kind::launch_wait, 0);
    kittens::launch_dependent_grids();     // gemm_scatter takes over each multiprocessor as it becomes free
    if (warp >= Cfg::CONSUMER_WARPS) {
        kittens::warpgroup::decrease_registers<Cfg::PRODUCER_REGISTERS>();
        const int role = warp - Cfg::CONSUMER_WARPS;
        if (role > 0 && role <= Cfg::CONSUMER_WGS) {
            store_tasks<Cfg, Epilogue, typename Source::push>(g, s, rank, role - 1);
        } else if constexpr (Source::LOADS) {
            if (role == 0 || role == 3) Source::load(g, p, s.more, s, rank, num_k_blocks, role == 3);
        } else if (role == 0) {
            if (kittens::elect_one()) load_tasks<Cfg, typename Source::gate>(g, s, rank, num_k_blocks);
        } else if (role == 3) {
            Source::run(g.gate.call, p, s.more);
        }
    } else {
        kittens::warpgroup::increase_registers<Cfg::CONSUMER_REGISTERS>();
        consume_tasks<Cfg, Epilogue>(g, s, rank, num_k_blocks, kittens::warpgroup::groupid());
    }
    if constexpr (Cfg::CLUSTER > 1) {
        __syncwarp();
        kittens::cluster_sync();
    }
}

// GEMM-scatter. The spare warp finishes rows (combines, reduces) from the start; the others join it when their tiles are done.
// Blocks start while gather_gemm ends: its tables are there (gather_gemm has waited for them before it let this grid start), rows
// are gated. Only what finishes waits for gather_gemm's end, so that no later grid starts before that and its abort flag is final.
template <class Cfg, class Finish = combine_finish,
          class Globals = gemm_globals<Cfg, typename Finish::gate, plain_epilogue, typename Finish::push>>
__global__ __launch_bounds__(Cfg::NUM_THREADS, 1) void gemm_scatter(
    const __grid_constant__ Globals g, const __grid_constant__ call_view c, const __grid_constant__ typename Finish::params p) {
    static_assert(Cfg::CONSUMER_WGS <= 2, "loader, storers and combiner fill one warpgroup");
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];
    auto &s = *reinterpret_cast<gemm_shared<Cfg, bf16> *>(dynamic_shared);
    const int warp = kittens::warpid(), rank = Cfg::CLUSTER == 1 ? 0 : kittens::cluster_ctarank();
    const int num_k_blocks = kittens::ceil_div(int(g.tokens.cols), Cfg::BLOCK_K);
    stamps_begin(c, stamp_kernel::gemm_scatter);
    if (threadIdx.x == 0) {
        init_semaphores<Cfg>(s);
        kittens::tma::prefetch_descriptor(&g.tokens.tma_maps[0]);
        kittens::tma::prefetch_descriptor(&g.weights.tma_maps[0]);
        kittens::tma::prefetch_descriptor(&g.out.tma_maps[0]);
    }
    if constexpr (Cfg::CLUSTER > 1) kittens::cluster_sync();
    else __syncthreads();
    if (warp >= Cfg::CONSUMER_WARPS) {
        kittens::warpgroup::decrease_registers<Cfg::PRODUCER_REGISTERS>();
        const int role = warp - Cfg::CONSUMER_WARPS;
        if (role == 0) {
            if (kittens::elect_one()) load_tasks<Cfg, typename Finish::gate>(g, s, rank, num_k_blocks);
        } else if (role <= Cfg::CONSUMER_WGS) {
            store_tasks<Cfg, plain_epilogue, typename Finish::push>(g, s, rank, role - 1);
        }
        __syncwarp();
        stamp_restart();
        kittens::wait_prerequisite_grids();
        stamp_lap_warp(stamp_kind::launch_wait, 0);
        Finish::template run<Cfg::SCALED ? 3 : 4>(c, p);  // the loader of e4m3 leaves fewer registers
    } else {
        kittens::warpgroup::increase_registers<Cfg::CONSUMER_REGISTERS>();
        consume_tasks<Cfg, plain_epilogue>(g, s, rank, num_k_blocks, kittens::warpgroup::groupid());
        __syncwarp();
        stamp_restart();
        kittens::wait_prerequisite_grids();
        stamp_lap_warp(stamp_kind::launch_wait, 0);
        Finish::template run<8>(c, p);
    }
    if constexpr (Cfg::CLUSTER > 1) {
        __syncwarp();
        kittens::cluster_sync();
    }
}

}  // namespace moe_tk::nvlink
