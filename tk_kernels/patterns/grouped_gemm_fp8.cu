// The e4m3 grouped GEMM configurations: 1 x 128 activation scales, 128 x 128 weight scales.
#include "grouped_gemm.cuh"

namespace moe_tk {

//                               type     M    N  stages  warpgroups M x N  cluster  output buffers
using f128x256_c1 = gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 1, 2>;
using f128x256_c2 = gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 2>;
using f128x128_c1 = gemm_config<fp8e4m3, 128, 128, 6, 2, 1, 1, 1>;
using f64x256_w1 = gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 2>;
using f64x128_w1 = gemm_config<fp8e4m3, 64, 128, 8, 1, 1, 1, 2>;

variant_list fp8_variants() {
    static const gemm_variant list[] = {
        make_variant<f128x256_c1, true>("128x256_s4_c1"),
        make_variant<f128x256_c2>("128x256_s4_c2"),
        make_variant<f128x128_c1>("128x128_s6_c1"),
        make_variant<f64x256_w1>("64x256_s5_w1_c1"),
        make_variant<f64x128_w1>("64x128_s8_w1_c1"),
    };
    return {list, sizeof(list) / sizeof(list[0])};
}

}  // namespace moe_tk
