// Tile configurations of the wgmma engine: what the compiler must know.
#pragma once

#include "../../thunderkittens/kittens.cuh"

namespace moe_tk {

// BLOCK_M x BLOCK_N output tile, computed by WGS_M x WGS_N consumer warpgroups of 64 rows each.
template <class T_, int BM, int BN, int STAGES_, int WGS_M_, int WGS_N_, int CLUSTER_,
          int OUT_STAGES_ = 2>
struct gemm_config {
    using T = T_;
    static constexpr int BLOCK_M = BM, BLOCK_N = BN, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int OUT_STAGES = OUT_STAGES_;  // 64 x 64 output buffers of each consumer warpgroup
    static constexpr int WGS_M = WGS_M_, WGS_N = WGS_N_, CONSUMER_WGS = WGS_M * WGS_N;
    static constexpr int BLOCK_K = kittens::SWIZZLE_BYTES / int(sizeof(T));  // one panel
    static constexpr int WG_ROWS = 64, WG_COLS = BN / WGS_N;
    static constexpr int A_SLAB = WG_ROWS, B_SLAB = BN / 2;  // rows moved by one TMA instruction
    static constexpr int CONSUMER_WARPS = CONSUMER_WGS * kittens::WARPGROUP_WARPS;
    static constexpr int NUM_THREADS = (CONSUMER_WGS + 1) * kittens::WARPGROUP_THREADS;
    // setmaxnreg: what a thread has at launch is divided anew. 504 registers x 128 threads for two consumer warpgroups.
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = CONSUMER_WGS == 1 ? 240 : 232;
    static_assert(CONSUMER_WGS == 1 || CONSUMER_WGS == 2, "one or two consumer warpgroups");
    static_assert((PRODUCER_REGISTERS + CONSUMER_WGS * CONSUMER_REGISTERS) * 128 <= 65536, "registers of an SM");
    static_assert(BM == WGS_M * WG_ROWS, "a consumer warpgroup computes 64 rows");
    static_assert(B_SLAB <= 256 && WG_COLS % 64 == 0, "TMA boxes have at most 256 rows; outputs leave 64 columns at a time");
};

}  // namespace moe_tk
