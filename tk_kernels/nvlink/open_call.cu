// The launch of open_call.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "layer.cuh"
#include "open_call.cuh"

namespace moe_tk::nvlink {

namespace {
void check(cudaError_t err, const char *what) {
    if (err != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(err));
}
}  // namespace

void prepare_open_call() {
    check(cudaFuncSetAttribute(open_call, cudaFuncAttributeMaxDynamicSharedMemorySize, OPEN_SHARED_BYTES), "open_call");
}

void launch_open_call(const workspace_view &w, const layer_call &call, cudaStream_t stream) {
    const tile_shape v = shape_of(w, call);
    const open_globals g{
        .call = w.call, .tables = w.tables, .counters = w.counters, .signature = call.signature,
        .hidden_states = call.hidden_states, .hidden_scales = call.hidden_scales, .topk_ids = call.topk_ids, .topk_weights = call.topk_weights,
        .num_tokens = call.num_tokens, .refused = call.refused, .export_waits = call.export_waits, .quantise = w.quantised,
        .ids_are_64 = call.ids_are_64,
        .weights_are_bf16 = call.weights_are_bf16, .num_experts = w.num_experts, .first_expert = w.first_expert,
        .num_local = w.num_local, .tensor_parallel = w.tensor_parallel, .choices = divisor(w.call.top_k), .chunks = divisor(w.call.job_chunk),
        .row_block = v.row_block, .segments = call.segments, .max_blocks = w.max_blocks, .max_slots = w.max_slots,
        .col_blocks1 = (2 * w.intermediate + v.gather_cols - 1) / v.gather_cols,
        .col_blocks2 = (w.call.hidden + v.scatter_cols - 1) / v.scatter_cols,
        .per_step2 = GROUP_COLS / v.scatter_cols, .passes = call.passes,
        .epoch = w.epoch, .blocks_done = w.blocks_done, .copies_done = w.copies_done, .routing_sent = w.routing_sent,
        .room = room_for(call.segments * w.num_local, w.call.top_k), .one_sender_pairs = ONE_SENDER_PAIRS, .one_builder_pairs = ONE_BUILDER_PAIRS};
    // One cluster builds; as many as help copy the rows, which is one for each 256 KiB.
    const int64_t row_bytes = int64_t(call.num_tokens) * w.call.hidden * 2, per_cluster = 256 * 1024;
    const int64_t useful = (row_bytes + per_cluster - 1) / per_cluster, most = w.num_sms / OPEN_CLUSTER - 1;
    const int64_t wanted = call.export_blocks > 0 ? call.export_blocks / OPEN_CLUSTER : useful;
    const int copiers = int(std::max<int64_t>(1, std::min(most, wanted)));
    const int clusters = 1 + copiers;
    open_call<<<clusters * OPEN_CLUSTER, OPEN_THREADS, OPEN_SHARED_BYTES, stream>>>(g);
    check(cudaGetLastError(), "open_call launch");
}

}  // namespace moe_tk::nvlink
