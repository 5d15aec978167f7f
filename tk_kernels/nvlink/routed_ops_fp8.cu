// e4m3 launches of the operations: the layer's, on rows of weights that the caller has interleaved; and plain products.
#include "fused_launch.cuh"
#include "routed_ops.cuh"

namespace moe_tk {

namespace nvlink {
// Tiles of a gather_gemm whose output is a result, in bf16, not what GEMM 2 takes.
template <class Base> struct result_config : Base {};
}  // namespace nvlink

// So the output buffers hold bf16, where gather_gemm's other ones hold what it multiplies.
template <class Base, class More>
struct gemm_shared<nvlink::result_config<Base>, kittens::fp8e4m3, More> : gemm_shared<nvlink::result_config<Base>, kittens::bf16, More> {};

}  // namespace moe_tk

namespace moe_tk::nvlink {

namespace {

using kittens::fp8e4m3;

// The wide tiles of fused_gemm_fp8.cu. Addressing rows of weights takes a few registers more: with 72 for the loaders of 128 rows, as
// there, ptxas spills one.
using gather_128 = gathering_config<rows_config<fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 1>, 80>>>;
using scatter_128 = rows_config<fused_config<gemm_config<fp8e4m3, 128, 256, 4, 2, 1, 2, 2>>>;
using gather_64 = gathering_config<rows_config<fused_config<gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 1>>>>;
using scatter_64 = rows_config<fused_config<gemm_config<fp8e4m3, 64, 256, 5, 1, 1, 1, 2>>>;

using product_128 = result_config<gather_128>;
using product_64 = result_config<gather_64>;

template <class Cfg> void launch_product(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    const int columns = 2 * w.intermediate;
    const auto globals = make_globals<Cfg, sources_gate, plain_epilogue, count_push>(
        w, w.expert_out, w.call.hidden, call.w13, columns, w.activated, {w.call}, {}, {w.counters.l1_done}, w.tables.tasks1, COUNT_TASKS1,
        make_scales<Cfg>(w, nullptr, call.w13_scales, columns));
    const gather_params<fp8e4m3> rows{.tokens = nullptr, .slot_pair = w.tables.slot_pair};
    launch(gather_gemm<Cfg, plain_epilogue, row_gather<Cfg>>, w.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER,
           gather_shared_bytes<Cfg, row_gather<Cfg>>(), behind, stream, globals, rows);
}
template <class Cfg> void prepare_product() {
    check_cuda(cudaFuncSetAttribute(gather_gemm<Cfg, plain_epilogue, row_gather<Cfg>>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    gather_shared_bytes<Cfg, row_gather<Cfg>>()), "ag_gemm");
}

bool small_blocks(const layer_call &call) { return fused_variants_fp8[call.variant].row_block == gather_64::BLOCK_M; }

}  // namespace

void prepare_scaled_routed_ops() {
    prepare<gather_64, scatter_64>();
    prepare<gather_128, scatter_128>();
    prepare_product<product_64>();
    prepare_product<product_128>();
}

void launch_scaled_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_gather<gather_64> : launch_gather<gather_128>)(w, call, behind, stream);
}

void launch_scaled_scatter(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_scatter<scatter_64, gather_64::BLOCK_N>
                        : launch_scatter<scatter_128, gather_128::BLOCK_N>)(w, call, behind, stream);
}

void launch_scaled_product(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_product<product_64> : launch_product<product_128>)(w, call, behind, stream);
}

}  // namespace moe_tk::nvlink
