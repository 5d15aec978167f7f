// Launches of the routed operations that the layer does not have.
#include "fused_launch.cuh"
#include "hand_out.cuh"
#include "routed_ops.cuh"

namespace moe_tk::nvlink {

namespace {

template <class Base> using checkpoint_config = rows_config<fused_config<Base>>;
using gather_128 = gathering_config<checkpoint_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>>;
using scatter_128 = checkpoint_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>;
using gather_64 = gathering_config<checkpoint_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>>;
using scatter_64 = checkpoint_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>;

// Gate and up rows alternate in groups of 8 in the kernels. Here they are read so from a checkpoint, where the gate rows of an
// expert come first: a descriptor of (groups of all experts, gate | up, 8 rows, H), of which a box is 8 x 2 x 8 x 64.
template <class Cfg> struct checkpoint_globals : gather_globals<Cfg, swiglu_epilogue, row_gather<Cfg>> {
    int expert_groups;  // 2 I / 8: an expert's first group has the number expert * expert_groups
    __device__ coord<> weights_at(const tile_task &t, int i, int panel, int) const {
        return {t.expert * expert_groups + (t.col_block * Cfg::BLOCK_N + i * Cfg::B_SLAB) / 16, 0, 0, panel * Cfg::PANEL_K};
    }
};

template <class Slab> CUtensorMap checkpoint_map(const void *w13, int experts, int inter, int hidden) {
    constexpr int GROUP = 8;
    static_assert(Slab::rows % (2 * GROUP) == 0 && Slab::num_panels == 1, "a box is whole pairs of groups and one panel");
    const uint64_t row = uint64_t(hidden) * sizeof(bf16);
    // The last group whose up rows exist; past it, and past an expert's own groups, rows belong to no output column.
    const cuuint64_t dims[4] = {cuuint64_t(hidden), GROUP, 2, cuuint64_t(2 * experts - 1) * inter / GROUP};
    const cuuint64_t strides[3] = {row, row * inter, row * GROUP};
    const cuuint32_t box[4] = {Slab::panel_cols, GROUP, 2, Slab::rows / (2 * GROUP)}, step[4] = {1, 1, 1, 1};
    CUtensorMap map{};
    const CUresult result = kittens::detail::encode_tiled()(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void *>(w13), dims, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("w13: cuTensorMapEncodeTiled failed with CUresult " + std::to_string(int(result)) + " for " +
                                 std::to_string(experts) + " experts of 2 x " + std::to_string(inter) + " x " + std::to_string(hidden));
    return map;
}

template <class Cfg> void launch_variant(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    using G = checkpoint_globals<Cfg>;
    G g{make_globals<Cfg, sources_gate, swiglu_epilogue, count_push>(
            w, w.expert_out, w.call.hidden, call.w13, 2 * w.intermediate, w.activated, {w.call},
            {call.alpha, call.beta, call.limit, call.weights_before_l2 ? w.tables.slot_weight : nullptr}, {w.counters.l1_done},
            w.tables.tasks1, COUNT_TASKS1),
        2 * w.intermediate / 8};
    if (w.num_local > 0)
        g.weights.tma_maps[0] = checkpoint_map<typename G::b_slab>(call.w13, w.num_local, w.intermediate, w.call.hidden);
    const gather_params<bf16> rows{.tokens = static_cast<const bf16 *>(call.hidden_states), .slot_pair = w.tables.slot_pair};
    launch(gather_gemm<Cfg, swiglu_epilogue, row_gather<Cfg>, G>, w.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER,
           gather_shared_bytes<Cfg, row_gather<Cfg>>(), behind, stream, g, rows);
}

template <class Gather, class Scatter> void prepare_variant() {
    check_cuda(cudaFuncSetAttribute(gather_gemm<Gather, swiglu_epilogue, row_gather<Gather>, checkpoint_globals<Gather>>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, gather_shared_bytes<Gather, row_gather<Gather>>()), "dispatch_gemm");
    check_cuda(cudaFuncSetAttribute(gemm_scatter<Scatter>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shared_bytes<Scatter, bf16>()), "gemm_combine");
}

__global__ void hand_out(const __grid_constant__ hand_out_globals g) {
    hand_out_all(g, block_call_is_good(g.call), blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

}  // namespace

void prepare_routed_ops() {
    prepare_variant<gather_64, scatter_64>();
    prepare_variant<gather_128, scatter_128>();
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, hand_out), "hand_out");
}

bool is_routed(const fused_variant &v) { return v.gather_cols == gather_64::BLOCK_N && v.scatter_cols == scatter_64::BLOCK_N; }

bool small_blocks(const layer_call &call) { return fused_variants[call.variant].row_block == gather_64::BLOCK_M; }

void launch_checkpoint_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_variant<gather_64> : launch_variant<gather_128>)(w, call, behind, stream);
}

void launch_checkpoint_scatter(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    (small_blocks(call) ? launch_scatter<scatter_64, gather_64::BLOCK_N>
                        : launch_scatter<scatter_128, gather_128::BLOCK_N>)(w, call, behind, stream);
}

void launch_hand_out(const workspace_view &w, const dispatch_result &result, cudaStream_t stream) {
    const hand_out_globals g{.call = w.call, .tables = w.tables, .result = result, .num_offsets = result.expert_offsets ? w.num_local + 1 : 0};
    launch(hand_out, 2 * w.num_sms, 256, 1, 0, false, stream, g);
}

}  // namespace moe_tk::nvlink
