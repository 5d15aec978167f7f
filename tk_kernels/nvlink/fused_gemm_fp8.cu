// The fused layer's e4m3 GEMM configurations: scales of 1 x 128 for rows and of 128 x 128 for weights.
#include "placed_gather.cuh"

namespace moe_tk::nvlink {

namespace {

using kittens::fp8e4m3;

// SwiGLU quantises 256 columns of one warpgroup, so blocks of 64 rows have one warpgroup.
//                                                   type  M    N  stages  warpgroups M x N  cluster  output buffers
using gather_128 = gathering_config<fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 1>, 72>>;
using scatter_128 = fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 2>>;
using gather_64 = gathering_config<fused_config<gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 1>>>;
using scatter_64 = fused_config<gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 2>>;
using placed_128 = fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 2>>;
using narrow_scatter_64 = fused_config<gemm_config<fp8e4m3, 64, 128, 8, 1, 1, 1, 2>>;

}  // namespace

const fused_variant fused_variants_fp8[] = {
    make_fused<gather_64, scatter_64>("64x256"),
    make_fused<gather_128, scatter_128>("128x256"),
    make_fused<gather_64, narrow_scatter_64>("64x256_128"),
    make_placed<placed_128, scatter_128>("128x256_placed"),
};
const int num_fused_variants_fp8 = sizeof(fused_variants_fp8) / sizeof(fused_variants_fp8[0]);

}  // namespace moe_tk::nvlink
