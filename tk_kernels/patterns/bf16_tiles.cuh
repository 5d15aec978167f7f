// The bf16 tile configurations that are compiled, with weights as they are and in tiles. docs/engine.md has what was measured.
#pragma once

#include "../engine/gemm_config.cuh"

namespace moe_tk {

//                               type  M    N  stages  warpgroups M x N  cluster  output buffers  panels
using c128x256_c2 = gemm_config<kittens::bf16, 128, 256, 4, 2, 1, 2, 2>;
using c128x256_c1 = gemm_config<kittens::bf16, 128, 256, 4, 2, 1, 1, 2>;
using c128x128_c2 = gemm_config<kittens::bf16, 128, 128, 6, 2, 1, 2, 2>;
using c64x256_w1 = gemm_config<kittens::bf16, 64, 256, 5, 1, 1, 1, 2>;
using c64x256_c2 = gemm_config<kittens::bf16, 64, 256, 5, 1, 2, 2, 1>;
using c64x128_p2 = gemm_config<kittens::bf16, 64, 128, 4, 1, 1, 1, 2, 2>;

}  // namespace moe_tk
