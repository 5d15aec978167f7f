// The fused layer's bf16 GEMM configurations.
#include "../patterns/bf16_tiles.cuh"
#include "fused_launch.cuh"

namespace moe_tk::nvlink {

namespace {

//                                               type  M    N  stages  warpgroups M x N  cluster  output buffers  panels
using gather_128 = gathering_config<fused_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>>;
using scatter_128 = fused_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>;
using narrow_scatter_128 = fused_config<c128x128_c2>;  // for few tiles, which fill the multiprocessors better
using gather_64 = gathering_config<fused_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>>;
using scatter_64 = fused_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>;
using narrow_gather_64 = gathering_config<fused_config<c64x128_p2>>;  // for few rows an expert
using narrow_scatter_64 = fused_config<c64x128_p2>;

}  // namespace

const fused_variant fused_variants[] = {
    make_fused<gather_64, scatter_64>("64x256"),
    make_fused<gather_128, scatter_128>("128x256"),
    make_fused<narrow_gather_64, narrow_scatter_64>("64x128"),
    make_fused<gather_128, narrow_scatter_128>("128x256_128"),
};
const int num_fused_variants = sizeof(fused_variants) / sizeof(fused_variants[0]);

}  // namespace moe_tk::nvlink
