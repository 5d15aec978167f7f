// Tile configurations of the wgmma engine: what the compiler must know.
#pragma once

#include "../../thunderkittens/kittens.cuh"

namespace moe_tk {

constexpr int WEIGHT_TILE_ROWS = 256;

// Arrivals with which a consumer warp gives a stage back: of one lane, behind __syncwarp. compute-sanitizer's racecheck does not follow
// what the other lanes have read that far, so for it all lanes arrive.
#ifdef MOE_TK_RACECHECK
constexpr int WARP_ARRIVALS = kittens::WARP_THREADS;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

// BLOCK_M x BLOCK_N output tile, computed by WGS_M x WGS_N consumer warpgroups of 64 rows each. A stage holds PANELS panels
// of 128 bytes of K.
template <class T_, int BM, int BN, int STAGES_, int WGS_M_, int WGS_N_, int CLUSTER_, int OUT_STAGES_ = 2, int PANELS_ = 1>
struct gemm_config {
    using T = T_;
    static constexpr int BLOCK_M = BM, BLOCK_N = BN, STAGES = STAGES_, CLUSTER = CLUSTER_, PANELS = PANELS_;
    static constexpr int OUT_STAGES = OUT_STAGES_;  // output buffers of each consumer warpgroup: 64 rows of 128 bytes
    static constexpr int WGS_M = WGS_M_, WGS_N = WGS_N_, CONSUMER_WGS = WGS_M * WGS_N;
    static constexpr int PANEL_K = kittens::SWIZZLE_BYTES / int(sizeof(T)), BLOCK_K = PANELS * PANEL_K;
    static constexpr int WG_ROWS = 64, WG_COLS = BN / WGS_N;
    // Rows moved by one TMA instruction. Blocks of 64 rows are for few tokens: there most rows are padding, which costs
    // nothing in steps of 16 rows.
    static constexpr int A_SLAB = BM == 64 && CLUSTER == 1 ? 16 : WG_ROWS, B_SLAB = BN / 2, OUT_SLAB = A_SLAB;
    static constexpr int CONSUMER_WARPS = CONSUMER_WGS * kittens::WARPGROUP_WARPS;
    static constexpr int NUM_THREADS = (CONSUMER_WGS + 1) * kittens::WARPGROUP_THREADS;
    // Weights [N, K] as they are, or cut into tiles of WEIGHT_TILE_ROWS x PANEL_K that lie one after the other, K first, so
    // that each load is one run of memory. Measured in e4m3 with few tokens: as fast as rows of 128 bytes that lie apart.
    static constexpr bool TILED_WEIGHTS = false;
    // Arrivals that fill a stage: the thread that loads by TMA, and others that copy (nvlink/gather_rows.cuh).
    static constexpr int LOADERS = 1;
    // e4m3: a scale for each row and 128 of K, one for each 128 x 128 of the weights; sums are promoted with them every
    // 128 of K, 128 columns at a time.
    static constexpr bool SCALED = sizeof(T) == 1;
    static constexpr int SCALE_BLOCK = 128;
    // How many scales of a row, of consecutive blocks of K, come together: they share a place of token_scales.
    static constexpr int SCALE_RUN = 1;
    // setmaxnreg: what a thread has at launch is divided anew. 504 registers x 128 threads for two consumer warpgroups.
    static constexpr int PRODUCER_REGISTERS = CONSUMER_WGS == 1 ? 40 : 56, CONSUMER_REGISTERS = CONSUMER_WGS == 1 ? 240 : 224;
    static_assert(CONSUMER_WGS == 1 || CONSUMER_WGS == 2, "one or two consumer warpgroups");
    static_assert((PRODUCER_REGISTERS + CONSUMER_WGS * CONSUMER_REGISTERS) * 128 <= 65536, "registers of an SM");
    static_assert(BM == WGS_M * WG_ROWS, "a consumer warpgroup computes 64 rows");
    static_assert(B_SLAB <= 256 && WG_COLS % 64 == 0, "TMA boxes have at most 256 rows; outputs leave 64 columns at a time");
    static_assert(!SCALED || (BLOCK_K == SCALE_BLOCK && WG_COLS % SCALE_BLOCK == 0), "scales cover 128 of K and 128 columns");
};

// The same with weights in tiles.
template <class Base> struct tiled : Base {
    static constexpr bool TILED_WEIGHTS = true;
};

}  // namespace moe_tk
