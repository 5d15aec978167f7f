// The routed operations over NVLink: launches of the layer on a caller's tensors, with weights in rows (not in the layer's tiles),
// and the launch that hands the results of dispatch_gemm out. The dense ones in e4m3 are these with one expert that every rank wants
// all rows of, so that slots are rows of the tensor: AG+GEMM is gather_gemm without SwiGLU, GEMM+RS is gemm_scatter.
#pragma once

#include "dispatch_result.hpp"
#include "layer.cuh"

namespace moe_tk::nvlink {

// Weights [E, N, K] as they are given.
template <class Base> struct rows_config : Base {
    static constexpr bool TILED_WEIGHTS = false;
};

enum routed_stage { ROUTED_OPEN = 1, ROUTED_GATHER = 2, ROUTED_SCATTER = 4, ROUTED_HAND_OUT = 8, ROUTED_PRODUCT = 16 };

void prepare_routed_ops();
void prepare_scaled_routed_ops();
bool is_routed(const fused_variant &v);  // the routed operations have these tiles: the wide ones
// gather_gemm into w.activated; call.w13 is [E_local, 2 I, H], gate rows first. `behind` as in fused_variant.
void launch_checkpoint_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream);
// gemm_scatter from w.activated; call.w2 is [E_local, H, I].
void launch_checkpoint_scatter(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream);
// The same in e4m3, where the caller gives w13 interleaved (swiglu_quantise_epilogue).
void launch_scaled_gather(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream);
void launch_scaled_scatter(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream);
// The products of gathered e4m3 rows with call.w13 [E_local, 2 I, H], as they are: w.activated is bf16 [slots, 2 I].
void launch_scaled_product(const workspace_view &w, const layer_call &call, bool behind, cudaStream_t stream);
// Rows of no pair become zero (e4m3: with scale 1), tables are copied; NaN and -1 if the call has not come to a result.
void launch_hand_out(const workspace_view &w, const dispatch_result &result, cudaStream_t stream);

}  // namespace moe_tk::nvlink
