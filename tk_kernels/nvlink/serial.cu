// Launches of the serial pattern: rows to their slots, GEMM 1, GEMM 2, combine, one after the other behind open_call. The GEMMs are the
// engine's own, without gate and push, on the tasks that open_call has listed.
#include <algorithm>

#include "../patterns/bf16_tiles.cuh"
#include "fused_launch.cuh"
#include "serial.cuh"

namespace moe_tk::nvlink {

namespace {

using kittens::fp8e4m3;

const gemm_variant &tile(const workspace_view &w, int index) { return plain_tiles(w.quantised).variants[index]; }

// What both GEMMs have in common: slots, tasks of `list`, their number at `count`.
gemm_args plain_args(const workspace_view &w, const plain_gemm &plain, const int4 *list, count_index count) {
    gemm_args a{};
    a.num_slots = w.max_slots, a.num_experts = std::max(1, w.num_local);  // a rank without experts has a dummy and no tasks
    a.tasks = reinterpret_cast<const int *>(list), a.num_tasks_ptr = w.tables.counts + count;
    a.block_rows = w.tables.block_target, a.num_sms = w.num_sms, a.weights_policy = plain.weights_policy;
    a.token_scales_stride = a.out_scales_stride = w.max_slots;
    return a;
}

// Rows one after the other, and the scales of each block of 128 columns.
template <class T> slot_rows<T> rows_of(const workspace_view &w) {
    return {.rows = static_cast<T *>(w.rows), .stride = w.call.hidden, .scales = w.slot_scales, .block_stride = w.max_slots};
}

}  // namespace

variant_list plain_tiles(bool quantised) {
    static const gemm_variant list[] = {
        make_variant<tiled<c128x256_c2>>("128x256_s4_c2"), make_variant<tiled<c128x128_c2>>("128x128_s6_c2"),
        make_variant<tiled<c64x256_c2>>("64x256_s5_w2_c2"), make_variant<tiled<c64x128_p2>>("64x128_s4_p2_c1"),
    };
    return quantised ? plain_tiles_fp8() : variant_list{list, sizeof(list) / sizeof(list[0])};
}

void prepare_serial() {
    for (const bool quantised : {false, true})
        for (int i = 0; i < plain_tiles(quantised).count; ++i) plain_tiles(quantised).variants[i].prepare();
    cudaFuncAttributes loaded;
    check_cuda(cudaFuncGetAttributes(&loaded, place_all<bf16>), "place_all");
    check_cuda(cudaFuncGetAttributes(&loaded, place_all<fp8e4m3>), "place_all, e4m3");
    check_cuda(cudaFuncGetAttributes(&loaded, combine_all), "combine_all");
}

tile_shape shape_of(const workspace_view &w, const layer_call &call) {
    if (call.gemm1.tile < 0) {
        const fused_variant &v = variant_of(w, call);
        return {v.row_block, v.gather_cols, v.scatter_cols};
    }
    return {tile(w, call.gemm1.tile).block_m, tile(w, call.gemm1.tile).block_n, tile(w, call.gemm2.tile).block_n};
}

void launch_pull(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream) {
    if (w.quantised)
        launch(place_all<fp8e4m3>, w.num_sms, PLACE_THREADS, 1, 0, behind, stream, w.call, place_params_of(w, nullptr, rows_of<fp8e4m3>(w)));
    else
        launch(place_all<bf16>, w.num_sms, PLACE_THREADS, 1, 0, behind, stream, w.call, place_params_of(w, call.hidden_states, rows_of<bf16>(w)));
}

void launch_gemm1(const workspace_view &w, const layer_call &call, cudaStream_t stream) {
    gemm_args a = plain_args(w, call.gemm1, w.tables.tasks1, COUNT_TASKS1);
    a.tokens = w.rows, a.weights = call.w13, a.out = w.activated;
    a.n = 2 * w.intermediate, a.k = w.call.hidden, a.tokens_stride = a.k, a.out_stride = w.intermediate;
    a.alpha = call.alpha, a.beta = call.beta, a.limit = call.limit;
    a.slot_weight = call.weights_before_l2 ? w.tables.slot_weight : nullptr;
    a.token_scales = w.slot_scales, a.weight_scales = call.w13_scales, a.out_scales = w.activated_scales;
    tile(w, call.gemm1.tile).launch[1](a, stream);
}

void launch_gemm2(const workspace_view &w, const layer_call &call, cudaStream_t stream) {
    gemm_args a = plain_args(w, call.gemm2, w.tables.tasks2, COUNT_TASKS2);
    a.tokens = w.activated, a.weights = call.w2, a.out = w.expert_out;
    a.n = w.call.hidden, a.k = w.intermediate, a.tokens_stride = a.k, a.out_stride = a.n;
    a.token_scales = w.activated_scales, a.weight_scales = call.w2_scales;
    tile(w, call.gemm2.tile).launch[0](a, stream);
}

void launch_combine(const workspace_view &w, const layer_call &call, cudaStream_t stream) {
    const tile_shape tiles = shape_of(w, call);
    launch(combine_all, w.num_sms, COMBINE_THREADS, 1, STAMP_SHARED_BYTES, false, stream, w.call,
           combine_params_of(w, call, tiles.row_block, tiles.scatter_cols));
}

}  // namespace moe_tk::nvlink
