// What the roles of a grouped GEMM share: the globals of a launch, and the stages, outputs and semaphores of a block.
#pragma once

#include <limits>

#include "gemm_config.cuh"
#include "tile_task.cuh"

namespace moe_tk {

using namespace kittens;

// 64 rows of 128 bytes: what a warpgroup hands to its storer at a time.
template <class Out> using out_tile = st<Out, 64, SWIZZLE_BYTES / int(sizeof(Out))>;

// Scales of e4m3 operands; nothing for other types.
template <bool SCALED> struct scale_params {};
template <> struct scale_params<true> {
    const float *tokens;    // (K / 128, stride): one for each slot and 128 of K
    int64_t tokens_stride;  // slots, a multiple of 4
    const float2 *weights;  // (experts, col_blocks, K / 128): for the even and the odd groups of 8 of 128 columns
    int col_blocks;         // ceil(N / 128)
};

template <class Cfg, class Gate, class Epilogue, class Push> struct gemm_globals {
    using T = typename Cfg::T;
    using Out = typename Epilogue::out_type;
    using a_slab = st<T, Cfg::A_SLAB, Cfg::PANEL_K>;
    using b_slab = st<T, Cfg::B_SLAB, Cfg::PANEL_K>;
    gl<T, 1, 1, -1, -1, a_slab> tokens;             // (slots, K)
    gl<T, 1, -1, -1, -1, b_slab> weights;           // (experts, N, K), or in tiles: (experts, N K / PANEL_K, PANEL_K)
    using out_slab = st<Out, Cfg::OUT_SLAB, out_tile<Out>::cols>;
    gl<Out, 1, 1, -1, -1, out_slab> out;            // (slots, N / COLUMN_RATIO)
    scale_params<Cfg::SCALED> scales;
    task_table tasks;
    typename Gate::params gate;
    typename Epilogue::params epilogue;
    typename Push::params push;
    tma::cache_policy tokens_policy, weights_policy;
    // Where a tile's operands and results lie. Globals of which they lie in several tensors, or in another order, hide these.
    __device__ const auto &tokens_of(const tile_task &) const { return tokens; }
    __device__ coord<> tokens_at(const tile_task &t, int row, int k) const { return {0, 0, t.row_block * Cfg::BLOCK_M + row, k}; }
    __device__ const float *token_scales_of(const tile_task &t, int k_block) const {  // e4m3: of a tile's rows, one after the other
        return scales.tokens + k_block * scales.tokens_stride + t.row_block * Cfg::BLOCK_M;
    }
    __device__ coord<> weights_at(const tile_task &t, int i, int panel, int num_panels) const {  // slab i of a panel of K
        if constexpr (Cfg::TILED_WEIGHTS) {
            static_assert(Cfg::BLOCK_N <= WEIGHT_TILE_ROWS, "a block's columns lie in one tile of weights");
            constexpr int BLOCKS = WEIGHT_TILE_ROWS / Cfg::BLOCK_N;  // in a tile
            const int tile = t.col_block / BLOCKS, row = t.col_block % BLOCKS * Cfg::BLOCK_N + i * Cfg::B_SLAB;
            if (Cfg::PANELS > 1 && panel >= num_panels) return {0, t.expert, int(weights.rows), 0};  // behind the last one: zeros
            return {0, t.expert, (tile * num_panels + panel) * WEIGHT_TILE_ROWS + row, 0};
        } else {
            return {0, t.expert, t.col_block * Cfg::BLOCK_N + i * Cfg::B_SLAB, panel * Cfg::PANEL_K};
        }
    }
    __device__ const auto &out_of(const tile_task &) const { return out; }
    __device__ coord<> out_at(const tile_task &t, int row, int col) const { return {0, 0, t.row_block * Cfg::BLOCK_M + row, col}; }
};

struct nothing_more {};
// `more`: what further roles of a kernel keep, in the room that the size's rounding to 1 KiB leaves.
template <class Cfg, class Out, class More = nothing_more> struct gemm_shared {
    struct stage {
        st<typename Cfg::T, Cfg::BLOCK_M, Cfg::PANEL_K> a[Cfg::PANELS];
        st<typename Cfg::T, Cfg::BLOCK_N, Cfg::PANEL_K> b[Cfg::PANELS];
    };
    stage inputs[Cfg::STAGES];
    out_tile<Out> outputs[Cfg::CONSUMER_WGS][Cfg::OUT_STAGES];
    sv_fl<Cfg::SCALED ? Cfg::BLOCK_M * Cfg::SCALE_RUN : 4> token_scales[Cfg::SCALED ? Cfg::STAGES : 1];  // by run, [row][block of K]
    semaphore inputs_arrived[Cfg::STAGES], inputs_finished[Cfg::STAGES];
    semaphore outputs_arrived[Cfg::CONSUMER_WGS][Cfg::OUT_STAGES], outputs_finished[Cfg::CONSUMER_WGS][Cfg::OUT_STAGES];
    [[no_unique_address]] More more;
#ifdef MOE_TK_TRACE
    stamp_room stamps;  // last
#endif
};

// The place of token_scales that the blocks of K of a task take their scales from, one after the other; loaders and consumers count
// alike. With as many places as stages a run's place is free when the stage of the first block of the run in its place is.
template <class Cfg> struct scale_place {
    int place = 0;
    __device__ __forceinline__ void advance() { place = place + 1 == Cfg::STAGES ? 0 : place + 1; }
    __device__ __forceinline__ void skip(int num_k_blocks) { place = (place + ceil_div(num_k_blocks, Cfg::SCALE_RUN)) % Cfg::STAGES; }
    __device__ __forceinline__ static bool begins(int k) { return k % Cfg::SCALE_RUN == 0; }
    __device__ __forceinline__ static bool ends(int k, int num_k_blocks) { return begins(k + 1) || k + 1 == num_k_blocks; }
};

// Dynamic shared memory of a launch.
template <class Cfg, class Out> constexpr int shared_bytes() {
    constexpr int bytes = int(sizeof(gemm_shared<Cfg, Out>));
    static_assert(bytes <= MAX_SHARED_MEMORY, "stages and outputs exceed shared memory: lower STAGES");
    return bytes;
}

template <class Cfg, class Shared> __device__ __forceinline__ void init_semaphores(Shared &s) {
    for (int i = 0; i < Cfg::STAGES; ++i) {
        init_semaphore(s.inputs_arrived[i], Cfg::LOADERS);  // the loader, with the bytes
        init_semaphore(s.inputs_finished[i], WARP_ARRIVALS * Cfg::CONSUMER_WARPS * Cfg::CLUSTER);
    }
    for (int w = 0; w < Cfg::CONSUMER_WGS; ++w)
        for (int i = 0; i < Cfg::OUT_STAGES; ++i) {
            init_semaphore(s.outputs_arrived[w][i], WARPGROUP_WARPS);
            init_semaphore(s.outputs_finished[w][i], 1);  // the storer
        }
    fence_semaphore_init();
}

// Whether consumer warpgroup `wg` has rows that are not padding, and something to store.
template <class Cfg> __device__ __forceinline__ bool has_rows(const cluster_work &w, int wg) {
    return !w.ghost() && (wg / Cfg::WGS_N) * Cfg::WG_ROWS < w.task.rows;
}

}  // namespace moe_tk
