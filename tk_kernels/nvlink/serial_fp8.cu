// The serial pattern's e4m3 GEMMs: those that choose_tile takes, and 128 x 256 with a cluster, which nothing takes yet.
#include "../patterns/fp8_tiles.cuh"
#include "../patterns/grouped_gemm.cuh"
#include "layer.cuh"

namespace moe_tk::nvlink {

variant_list plain_tiles_fp8() {
    static const gemm_variant list[] = {
        make_variant<tiled<f128x256_c1>>("128x256_s4_c1"), make_variant<tiled<f128x256_c2>>("128x256_s4_c2"),
        make_variant<tiled<f64x256_w1>>("64x256_s5_w1_c1"), make_variant<tiled<f64x128_w1>>("64x128_s8_w1_c1"),
    };
    return {list, sizeof(list) / sizeof(list[0])};
}

}  // namespace moe_tk::nvlink
