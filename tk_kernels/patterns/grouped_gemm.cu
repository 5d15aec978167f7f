// The bf16 grouped GEMM configurations.
#include "bf16_tiles.cuh"
#include "grouped_gemm.cuh"

namespace moe_tk {

variant_list bf16_variants() {
    static const gemm_variant list[] = {
        make_variant<c128x256_c2, true>("128x256_s4_c2"),
        make_variant<c128x256_c1>("128x256_s4_c1"),
        make_variant<c128x128_c2>("128x128_s6_c2"),
        make_variant<c64x256_w1>("64x256_s5_w1_c1"),
        make_variant<c64x256_c2>("64x256_s5_w2_c2"),
        make_variant<c64x128_p2>("64x128_s4_p2_c1"),
    };
    return {list, sizeof(list) / sizeof(list[0])};
}

}  // namespace moe_tk
