// The e4m3 tile configurations that are compiled, with weights as they are and in tiles. docs/engine.md has what was measured.
#pragma once

#include "../engine/gemm_config.cuh"

namespace moe_tk {

//                               type              M    N  stages  warpgroups M x N  cluster  output buffers
using f128x256_c1 = gemm_config<kittens::fp8e4m3, 128, 256, 4, 2, 1, 1, 2>;
using f128x256_c2 = gemm_config<kittens::fp8e4m3, 128, 256, 4, 2, 1, 2, 2>;
using f128x128_c1 = gemm_config<kittens::fp8e4m3, 128, 128, 6, 2, 1, 1, 1>;
using f64x256_w1 = gemm_config<kittens::fp8e4m3, 64, 256, 5, 1, 1, 1, 2>;
using f64x128_w1 = gemm_config<kittens::fp8e4m3, 64, 128, 8, 1, 1, 1, 2>;

}  // namespace moe_tk
