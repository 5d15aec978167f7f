// Launches of one call of the layer: from pointers and sizes to the three kernels of the fused pattern, or the five of the
// serial one.
#pragma once

#include <cstdint>

#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk {
struct variant_list;  // patterns/grouped_gemm.cuh
}

namespace moe_tk::nvlink {

// What lives as long as a workspace.
struct workspace_view {
    call_view call;
    table_view tables;
    counter_view counters;
    uint32_t *epoch, *blocks_done, *copies_done, *routing_sent;
    void *rows;            // [max_slots, H] gathered rows: of the serial pattern only
    float *slot_scales;    // e4m3: [H / 128, max_slots], theirs
    void *activated;       // [max_slots, I]
    void *expert_out;      // [max_slots, H] bf16, the memory of `rows` and their scales: GEMM 2 writes it, when GEMM 1 has read them
                           // (a fused call: a row block when GEMM 1 has read that, place_rows.cuh)
    float *activated_scales;  // e4m3: [I / 128, scales_stride]
    int scales_stride;        // max_slots, but where they are a caller's; a multiple of 4
    int quantised;         // rows and weights are e4m3 with scales, else bf16
    int num_experts, first_expert, num_local, tensor_parallel;
    int max_slots, max_blocks;
    int intermediate;      // I of this rank, a multiple of 8
    int num_sms;
};

// How a GEMM of the serial pattern is computed; of a fused one, how its weights are kept in L2.
struct plain_gemm {
    int tile = -1;           // of plain_tiles(); -1: the call is fused
    int weights_policy = 0;  // as in gemm_args
};

// One call. Shapes as in moe_tk.MoELayer; weights of this rank in the engine's layout.
struct layer_call {
    const void *hidden_states, *topk_ids, *topk_weights;
    const float *hidden_scales;  // [T, H / 128] of e4m3 rows, or nullptr: rows are bf16
    void *out;
    const void *w13;  // [E_local, 2 I, H], gate and up rows alternating in groups of 8, in tiles
    const void *w2;   // [E_local, H, I], in tiles
    const void *w13_scales, *w2_scales;  // e4m3: [E_local, N / 128, K / 128, 2] of each, else nullptr
    uint64_t signature;
    int num_tokens, refused, ids_are_64, weights_are_bf16;
    int variant, segments, passes, weights_before_l2;  // passes: over the columns of GEMM 2, 1 .. MAX_COL_GROUPS
    float alpha, beta, limit;
    int export_blocks;     // of open_call that send rows; 0: chosen by their number
    int export_waits = 0;     // the call before owed no rows, so that only a rank's header says that it has read them all
    int activated_given = 0;  // there is no GEMM 1 in this call
    plain_gemm gemm1 = {}, gemm2 = {};  // both or none; then `variant` does not matter
};

// Fused: open, gather, scatter. Serial: open, pull (rows to their slots), gemm1, gemm2, combine.
enum stage_bit { STAGE_OPEN = 1, STAGE_GATHER = 2, STAGE_SCATTER = 4, STAGE_PULL = 8, STAGE_GEMM1 = 16, STAGE_GEMM2 = 32, STAGE_COMBINE = 64 };

struct fused_variant {
    const char *name;
    int row_block, gather_cols, scatter_cols, gather_shared, scatter_shared;
    bool placed;        // gather() brings rows to their slots first, in a launch of its own
    void (*prepare)();  // loads the kernels: nothing may be loaded while a rank waits
    // `behind`: the launch before it on the stream is the stage before it, and this one may start while that one ends.
    void (*gather)(const workspace_view &, const layer_call &, bool behind, cudaStream_t);
    void (*scatter)(const workspace_view &, const layer_call &, bool behind, cudaStream_t);
};
// As in moe_tk.planner.fused_tiles, by index: one of 256 columns for each row block, then those with narrower tiles.
extern const fused_variant fused_variants[], fused_variants_fp8[];
extern const int num_fused_variants, num_fused_variants_fp8;
inline const fused_variant &variant_of(const workspace_view &w, const layer_call &call) {
    return (w.quantised ? fused_variants_fp8 : fused_variants)[call.variant];
}

// Tiles of the call's GEMMs, which the task lists of open_call are made for.
struct tile_shape { int row_block, gather_cols, scatter_cols; };
tile_shape shape_of(const workspace_view &, const layer_call &);

void prepare_open_call();
void launch_open_call(const workspace_view &, const layer_call &, cudaStream_t);

// Of the serial pattern's GEMMs. Those of e4m3 that are narrower than 256 columns have no SwiGLU: launch[1] is missing.
variant_list plain_tiles(bool quantised), plain_tiles_fp8();

// The serial pattern, each with open_call's tables of a call with the same tiles.
void prepare_serial();
void launch_pull(const workspace_view &, const layer_call &, bool behind, cudaStream_t);
void launch_gemm1(const workspace_view &, const layer_call &, cudaStream_t);
void launch_gemm2(const workspace_view &, const layer_call &, cudaStream_t);
void launch_combine(const workspace_view &, const layer_call &, cudaStream_t);

}  // namespace moe_tk::nvlink
