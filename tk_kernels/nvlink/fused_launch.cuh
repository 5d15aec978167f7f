// From a workspace and a call to the launches of the two persistent templates.
#pragma once

#include "../patterns/grouped_gemm.cuh"
#include "fused_gemm.cuh"
#include "role_params.cuh"

namespace moe_tk::nvlink {

using kittens::bf16;
using kittens::tma::cache_policy;

template <class Cfg, class Gate, class Epilogue, class Push>
gemm_globals<Cfg, Gate, Epilogue, Push> make_globals(const workspace_view &w, const void *in, int k, const void *weights,
                                                                   int n, void *out, typename Gate::params gate,
                                                                   typename Epilogue::params epilogue, typename Push::params push,
                                                                   const int4 *tasks, count_index count,
                                                                   scale_params<Cfg::SCALED> scales = {}) {
    using T = typename Cfg::T;
    T *tokens = static_cast<T *>(const_cast<void *>(in)), *matrix = static_cast<T *>(const_cast<void *>(weights));
    const int experts = w.num_local > 0 ? w.num_local : 1;  // a rank without experts has a dummy and no tasks
    const matrix_extents extents = weight_extents<Cfg>(n, k);  // moe_tk.runtime.nvlink_layer.tiled makes the tiles
    return {.tokens = {tokens, 1, 1, w.max_slots, k},
            .weights = {matrix, 1, experts, extents.rows, extents.cols},
            .out = {static_cast<typename Epilogue::out_type *>(out), 1, 1, w.max_slots, n / Epilogue::COLUMN_RATIO},
            .scales = scales,
            .tasks = {.tasks = tasks, .num_tasks_ptr = w.tables.counts + count, .num_tasks = 0, .block_rows = w.tables.block_target},
            .gate = gate,
            .epilogue = epilogue,
            .push = push,
            .tokens_policy = cache_policy::NORMAL,
            .weights_policy = cache_policy::NORMAL};
}

template <class Kernel, class... Args>
void launch(Kernel kernel, int num_sms, int threads, int cluster, int smem, bool behind, cudaStream_t stream, const Args &...args) {
    cudaLaunchAttribute attrs[2]{};
    attrs[0].id = cudaLaunchAttributeClusterDimension;
    attrs[0].val.clusterDim.x = cluster, attrs[0].val.clusterDim.y = 1, attrs[0].val.clusterDim.z = 1;
    attrs[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_sms / cluster * cluster), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem, config.stream = stream, config.attrs = attrs, config.numAttrs = behind ? 2 : 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "fused GEMM launch");
}

template <class Scatter> void prepare_scatter() {
    check_cuda(cudaFuncSetAttribute(gemm_scatter<Scatter>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shared_bytes<Scatter, bf16>()), "gemm_scatter");
}
template <class Gather, class Scatter> void prepare() {
    check_cuda(cudaFuncSetAttribute(gather_gemm<Gather, activation_epilogue<Gather>, row_gather<Gather>>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, gather_shared_bytes<Gather, row_gather<Gather>>()), "gather_gemm");
    prepare_scatter<Scatter>();
}

// Scales of both operands of a GEMM with rows of K elements and N weight rows; nothing for bf16.
template <class Cfg> scale_params<Cfg::SCALED> make_scales(const workspace_view &w, const float *rows, const void *weights, int n) {
    if constexpr (Cfg::SCALED)
        return {.tokens = rows, .tokens_stride = w.scales_stride, .weights = static_cast<const float2 *>(weights), .col_blocks = kittens::ceil_div(n, 128)};
    else return {};
}
template <class Cfg> typename activation_epilogue<Cfg>::params make_activation(const workspace_view &w, const layer_call &call) {
    const swiglu_params act{call.alpha, call.beta, call.limit, call.weights_before_l2 ? w.tables.slot_weight : nullptr};
    if constexpr (Cfg::SCALED) return {.act = act, .scales = w.activated_scales, .stride = w.scales_stride};
    else return act;
}

template <class Cfg> void launch_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    using T = typename Cfg::T;
    // Of the rows' descriptor only the number of columns counts: row_gather loads them itself, with their scales.
    auto globals = make_globals<Cfg, sources_gate, activation_epilogue<Cfg>, count_push>(
        w, w.expert_out, w.call.hidden, call.w13, 2 * w.intermediate, w.activated, {w.call}, make_activation<Cfg>(w, call),
        {w.counters.l1_done}, w.tables.tasks1, COUNT_TASKS1, make_scales<Cfg>(w, nullptr, call.w13_scales, 2 * w.intermediate));
    globals.weights_policy = policy_of(call.gemm1.weights_policy);
    const gather_params<T> rows{.tokens = static_cast<const T *>(Cfg::SCALED ? nullptr : call.hidden_states), .slot_pair = w.tables.slot_pair};
    launch(gather_gemm<Cfg, activation_epilogue<Cfg>, row_gather<Cfg>>, w.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER,
           gather_shared_bytes<Cfg, row_gather<Cfg>>(), behind, stream, globals, rows);
}

template <class Cfg, int GATHER_COLS> void launch_scatter(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    static_assert(GROUP_COLS % Cfg::BLOCK_N == 0, "tiles of GEMM 2 belong to one column group each");
    auto globals = make_globals<Cfg, activated_gate, plain_epilogue, group_push>(
        w, w.activated, w.intermediate, call.w2, w.call.hidden, w.expert_out,
        {{w.call, w.counters.l1_done}, call.activated_given ? 0u : uint32_t(kittens::ceil_div(2 * w.intermediate, GATHER_COLS))}, {},
        {w.counters.l2_done, tiles_of(w.call.hidden, Cfg::BLOCK_N)}, w.tables.tasks2, COUNT_TASKS2,
        make_scales<Cfg>(w, w.activated_scales, call.w2_scales, w.call.hidden));
    globals.weights_policy = policy_of(call.gemm2.weights_policy);
    const combine_params combine = combine_params_of(w, call, Cfg::BLOCK_M, Cfg::BLOCK_N);
    launch(gemm_scatter<Cfg>, w.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER, shared_bytes<Cfg, bf16>(), behind, stream, globals, w.call,
           combine);
}

template <class Gather, class Scatter> constexpr fused_variant make_fused(const char *name) {
    static_assert(Gather::BLOCK_M == Scatter::BLOCK_M, "both GEMMs of a call share the slots and their row blocks");
    return {name, Gather::BLOCK_M, Gather::BLOCK_N, Scatter::BLOCK_N, gather_shared_bytes<Gather, row_gather<Gather>>(), shared_bytes<Scatter, bf16>(), false,
            prepare<Gather, Scatter>, launch_gather<Gather>, launch_scatter<Scatter, Gather::BLOCK_N>};
}

}  // namespace moe_tk::nvlink
