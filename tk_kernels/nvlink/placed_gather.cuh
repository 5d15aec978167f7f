// gather_gemm on rows that place_all has brought to their slots, by TMA. For e4m3 calls with many rows an expert: there copying each row
// once costs less than its loaders' copies of it for each column block (docs/performance.md).
#pragma once

#include <stdexcept>
#include <string>

#include "fused_launch.cuh"

namespace moe_tk::nvlink {

// The source of gather_gemm: TMA loads, and nobody moves anything.
template <class Cfg> struct placed_source {
    using gate = sources_gate;
    using push = count_push;
    struct params {};
    using shared = nothing_more;
    static constexpr bool LOADS = false;
    __device__ static void init(shared &) {}
    __device__ static void run(const call_view &, const params &, shared &) {}
};
template <class Cfg> struct placed_globals : gather_globals<Cfg, activation_epilogue<Cfg>, placed_source<Cfg>> {
    static_assert(Cfg::BLOCK_M == slot_rows<typename Cfg::T>::SCALE_RUN_ROWS, "a row block's scales are one run");
    slot_rows<typename Cfg::T> slots;
    __device__ const float *token_scales_of(const tile_task &t, int k_block) const { return slots.scale(t.row_block * Cfg::BLOCK_M, k_block); }
};
template <class Cfg> constexpr auto *placed_gather = gather_gemm<Cfg, activation_epilogue<Cfg>, placed_source<Cfg>, placed_globals<Cfg>>;

template <class Cfg> void launch_placed_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    using T = typename Cfg::T;
    if (!rows_fit_outputs(w.call.hidden))
        throw std::invalid_argument("variant: rows of " + std::to_string(w.call.hidden) + " columns cannot be placed in their outputs, wanted 512 to 16384");
    const slot_rows<T> slots = rows_in_outputs<T>(w.expert_out, w.call.hidden);
    launch(place_all<T>, w.num_sms, PLACE_THREADS, 1, 0, behind, stream, w.call, place_params_of(w, nullptr, slots));
    placed_globals<Cfg> globals{make_globals<Cfg, sources_gate, activation_epilogue<Cfg>, count_push>(
        w, w.expert_out, w.call.hidden, call.w13, 2 * w.intermediate, w.activated, {w.call}, make_activation<Cfg>(w, call),
        {w.counters.l1_done}, w.tables.tasks1, COUNT_TASKS1, make_scales<Cfg>(w, nullptr, call.w13_scales, 2 * w.intermediate)), slots};
    globals.tokens = {slots.rows, 1, 1, w.max_slots, w.call.hidden, slots.stride};
    globals.weights_policy = policy_of(call.gemm1.weights_policy);
    launch(placed_gather<Cfg>, w.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER, gather_shared_bytes<Cfg, placed_source<Cfg>>(), true, stream,
           globals, typename placed_source<Cfg>::params{});
}

template <class Gather, class Scatter> constexpr fused_variant make_placed(const char *name) {
    constexpr int SHARED = gather_shared_bytes<Gather, placed_source<Gather>>();
    constexpr auto prepare = [] {
        cudaFuncAttributes loaded;
        check_cuda(cudaFuncGetAttributes(&loaded, place_all<typename Gather::T>), "place_all");
        check_cuda(cudaFuncSetAttribute(placed_gather<Gather>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED), "gather_gemm of placed rows");
        prepare_scatter<Scatter>();
    };
    return {name, Gather::BLOCK_M, Gather::BLOCK_N, Scatter::BLOCK_N, SHARED, shared_bytes<Scatter, bf16>(), true, prepare,
            launch_placed_gather<Gather>, launch_scatter<Scatter, Gather::BLOCK_N>};
}

}  // namespace moe_tk::nvlink
