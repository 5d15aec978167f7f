// Launches of one call of the fused layer: from pointers and sizes to the three kernels.
#pragma once

#include <cstdint>

#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

// What lives as long as a workspace.
struct workspace_view {
    call_view call;
    table_view tables;
    counter_view counters;
    uint32_t *epoch, *blocks_done, *copies_done, *routing_sent;
    int *scratch;
    uint8_t *marks;        // [max_slots]
    void *rows;            // [max_slots, H] gathered rows, then the experts' outputs
    void *activated;       // [max_slots, I]
    int num_experts, first_expert, num_local, tensor_parallel;
    int max_slots, max_blocks;
    int intermediate;      // I of this rank, a multiple of 8
    int num_sms;
};

// One call. Shapes as in moe_tk.MoELayer; weights of this rank in the engine's layout.
struct layer_call {
    const void *hidden_states, *topk_ids, *topk_weights;
    void *out;
    const void *w13;  // [E_local, 2 I, H], gate and up rows alternating in groups of 8, in tiles
    const void *w2;   // [E_local, H, I], in tiles
    uint64_t signature;
    int num_tokens, refused, ids_are_64, weights_are_bf16;
    int variant, segments, passes, weights_before_l2;  // passes: over the columns of GEMM 2, 1 .. MAX_COL_GROUPS
    float alpha, beta, limit;
    int mover_blocks;  // blocks of gather_gemm whose mover moves rows; 0: all
    int export_waits = 0;     // the call before owed no rows, so that only a rank's header says that it has read them all
    int activated_given = 0;  // there is no GEMM 1 in this call
};

enum stage_bit { STAGE_OPEN = 1, STAGE_GATHER = 2, STAGE_SCATTER = 4 };

struct fused_variant {
    const char *name;
    int row_block, gather_cols, scatter_cols, gather_shared, scatter_shared;
    void (*prepare)();  // loads the kernels: nothing may be loaded while a rank waits
    // `behind`: the launch before it on the stream is the stage before it, and this one may start while that one ends.
    void (*gather)(const workspace_view &, const layer_call &, bool behind, cudaStream_t);
    void (*scatter)(const workspace_view &, const layer_call &, bool behind, cudaStream_t);
};
extern const fused_variant fused_variants[];
extern const int num_fused_variants;

void prepare_open_call();
void launch_open_call(const workspace_view &, const layer_call &, cudaStream_t);

}  // namespace moe_tk::nvlink
