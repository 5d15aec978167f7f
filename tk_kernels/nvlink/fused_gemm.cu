// The fused layer's bf16 GEMM configurations.
#include "fused_launch.cuh"

namespace moe_tk::nvlink {

namespace {

// One output buffer per warpgroup where the mover's ring needs the room: SwiGLU has half as many columns to store.
//                                               type  M    N  stages  warpgroups M x N  cluster  output buffers
using gather_128 = gathering_config<fused_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>>;
using scatter_128 = fused_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>;
using gather_64 = gathering_config<fused_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>>;
using scatter_64 = fused_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>;

}  // namespace

const fused_variant fused_variants[] = {
    make_fused<gather_64, scatter_64>("64x256"),
    make_fused<gather_128, scatter_128>("128x256"),
};
const int num_fused_variants = sizeof(fused_variants) / sizeof(fused_variants[0]);

}  // namespace moe_tk::nvlink
