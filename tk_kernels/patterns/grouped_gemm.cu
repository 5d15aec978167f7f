// The bf16 grouped GEMM configurations.
#include "grouped_gemm.cuh"

namespace moe_tk {

//                               type  M    N  stages  warpgroups M x N  cluster  output buffers
using c128x256_c2 = gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>;
using c128x256_c1 = gemm_config<bf16, 128, 256, 4, 2, 1, 1, 2>;
using c128x128_c2 = gemm_config<bf16, 128, 128, 6, 2, 1, 2, 2>;
using c64x256_w2 = gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>;
using c64x256_w1 = gemm_config<bf16, 64, 256, 5, 1, 1, 1, 2>;
using c64x256_c2 = gemm_config<bf16, 64, 256, 5, 1, 2, 2, 1>;
using c64x128_w1 = gemm_config<bf16, 64, 128, 8, 1, 1, 1, 2>;

const gemm_variant bf16_variants[] = {
    make_variant<c128x256_c2>("128x256_s4_c2"),   make_variant<c128x256_c1>("128x256_s4_c1"),
    make_variant<c128x128_c2>("128x128_s6_c2"),   make_variant<c64x256_w2>("64x256_s5_w2_c1"),
    make_variant<c64x256_w1>("64x256_s5_w1_c1"),  make_variant<c64x256_c2>("64x256_s5_w2_c2"),
    make_variant<c64x128_w1>("64x128_s8_w1_c1"),
};
const int num_bf16_variants = sizeof(bf16_variants) / sizeof(bf16_variants[0]);

}  // namespace moe_tk
