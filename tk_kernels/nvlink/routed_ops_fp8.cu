// e4m3 launches of the routed operations: the layer's, on rows of weights that the caller has interleaved.
#include "fused_launch.cuh"
#include "routed_ops.cuh"

namespace moe_tk::nvlink {

namespace {

using kittens::fp8e4m3;

// The wide tiles of fused_gemm_fp8.cu. Addressing rows of weights takes a few registers more: with 72 for the loaders of 128 rows, as
// there, ptxas spills one.
using gather_128 = gathering_config<rows_config<fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 1>, 80>>>;
using scatter_128 = rows_config<fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 2>>>;
using gather_64 = gathering_config<rows_config<fused_config<gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 1>>>>;
using scatter_64 = rows_config<fused_config<gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 2>>>;

bool small_blocks(const layer_call &call) { return fused_variants_fp8[call.variant].row_block == gather_64::BLOCK_M; }

}  // namespace

void prepare_scaled_routed_ops() {
    prepare<gather_64, scatter_64>();
    prepare<gather_128, scatter_128>();
}

void launch_scaled_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_gather<gather_64> : launch_gather<gather_128>)(w, call, behind, stream);
}

void launch_scaled_scatter(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_scatter<scatter_64, gather_64::BLOCK_N>
                        : launch_scatter<scatter_128, gather_128::BLOCK_N>)(w, call, behind, stream);
}

}  // namespace moe_tk::nvlink
