// The e4m3 grouped GEMM configurations: 1 x 128 activation scales, 128 x 128 weight scales.
#include "fp8_tiles.cuh"
#include "grouped_gemm.cuh"

namespace moe_tk {

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
