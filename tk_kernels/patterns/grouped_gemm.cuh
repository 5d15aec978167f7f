// Launches of the grouped GEMM: run-time arguments to globals, shared memory, clusters.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#include "../engine/grouped_gemm.cuh"
#include "../hooks/counters.cuh"
#include "../hooks/epilogue.cuh"
#include "../hooks/noop.cuh"

namespace moe_tk {

// Plain pointers and sizes, as bindings pass them. Device pointers unless said.
struct gemm_args {
    const void *tokens, *weights;  // (slots, k) and (experts, n, k), rows contiguous; weights in tiles where the configuration says so
    void *out;                     // (slots, n) or, with SwiGLU, (slots, n / 2)
    int num_slots, n, k, num_experts;
    int64_t tokens_stride, out_stride;  // elements between rows
    const int *tasks, *num_tasks_ptr;   // (num_tasks, 4) and a device count, or nullptr: num_tasks
    int num_tasks;
    const int *block_rows;  // (row blocks,) or nullptr
    float alpha, beta, limit;
    const float *slot_weight;  // (slots,) or nullptr
    // e4m3: scales of the operands and of a quantised output, as in the engine and its hook
    const float *token_scales;
    int64_t token_scales_stride;
    const void *weight_scales;
    float *out_scales;
    int64_t out_scales_stride;
    // hooks over counters: all of them or none
    const uint32_t *gate_arrived, *gate_want;
    uint64_t gate_timeout_ns;
    void *gate_record;
    uint32_t *push_finished;
    int num_sms;               // blocks of the persistent grid
    int weights_policy;        // 0 normal, 1 evict first, 2 evict last
};

inline void check_cuda(cudaError_t err, const char *what) {
    if (err != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(err));
}

inline kittens::tma::cache_policy policy_of(int index) {
    using kittens::tma::cache_policy;
    return index == 1 ? cache_policy::EVICT_FIRST : index == 2 ? cache_policy::EVICT_LAST : cache_policy::NORMAL;
}

inline swiglu_params activation_params(const gemm_args &a) {
    return {.alpha = a.alpha, .beta = a.beta, .limit = a.limit, .slot_weight = a.slot_weight};
}
template <class Hook> typename Hook::params hook_params(const gemm_args &) { return {}; }
template <> inline swiglu_epilogue::params hook_params<swiglu_epilogue>(const gemm_args &a) { return activation_params(a); }
template <> inline swiglu_quantise_epilogue::params hook_params<swiglu_quantise_epilogue>(const gemm_args &a) {
    return {.act = activation_params(a), .scales = a.out_scales, .stride = a.out_scales_stride};
}
template <> inline counter_gate::params hook_params<counter_gate>(const gemm_args &a) {
    return {.arrived = a.gate_arrived, .want = a.gate_want, .timeout_ns = a.gate_timeout_ns,
            .record = static_cast<wait_record *>(a.gate_record)};
}
template <> inline counter_push::params hook_params<counter_push>(const gemm_args &a) { return {.finished = a.push_finished}; }

template <bool SCALED> scale_params<SCALED> scales_of(const gemm_args &a) {
    if constexpr (SCALED)
        return {.tokens = a.token_scales, .tokens_stride = a.token_scales_stride,
                .weights = static_cast<const float2 *>(a.weight_scales), .col_blocks = ceil_div(a.n, 128)};
    else return {};
}

// A task table from offsets, for callers without a schedule: group by group, supertiles of 8 row blocks, column by column, the
// row order alternating, so that neighbours in the order always share a row or a column block.
struct task_args {
    const int *group_offsets;  // (num_groups + 1,) first slot of each group, multiples of block_m
    const int *group_rows;     // (num_groups,) rows of each group that are not padding, or nullptr: all
    int num_groups, num_experts, num_col_blocks, block_m;
    int *tasks;       // (row blocks * column blocks, 4)
    int *num_tasks;   // (1,)
    int *block_rows;  // (row blocks,)
};
void build_tasks(const task_args &args, cudaStream_t stream);

// One persistent launch on `stream`. No host synchronisation; nothing but the launch reaches the stream.
template <class Kernel, class G>
void launch_persistent(Kernel kernel, const G &globals, int grid, int threads, int cluster, int smem, cudaStream_t stream) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem), "shared memory size");
    cudaLaunchAttribute attr{};
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = cluster, attr.val.clusterDim.y = 1, attr.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem, config.stream = stream, config.attrs = &attr, config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, globals), "grouped_gemm launch");
}

// Loads a kernel now: nothing may be loaded while a peer waits for what comes behind it.
template <class Cfg, class Epilogue> void prepare_grouped_gemm() {
    check_cuda(cudaFuncSetAttribute(grouped_gemm<Cfg, no_gate, Epilogue, no_push>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shared_bytes<Cfg, typename Epilogue::out_type>()), "shared memory size");
}

// Extents of the weights of one expert in memory: (n, k), or in tiles.
struct matrix_extents { int rows, cols; };
template <class Cfg> matrix_extents weight_extents(int n, int k) {
    if (!Cfg::TILED_WEIGHTS) return {n, k};
    return {ceil_div(n, WEIGHT_TILE_ROWS) * WEIGHT_TILE_ROWS * ceil_div(k, Cfg::PANEL_K), Cfg::PANEL_K};
}

template <class Cfg, class Gate, class Epilogue, class Push>
void launch_grouped_gemm(const gemm_args &a, cudaStream_t stream) {
    if (a.num_slots == 0 || a.n == 0) return;  // nothing to write, and TMA has no descriptor for an empty tensor
    using T = typename Cfg::T;
    using G = gemm_globals<Cfg, Gate, Epilogue, Push>;
    using Out = typename G::Out;
    const matrix_extents matrix = weight_extents<Cfg>(a.n, a.k);
    const G globals{
        .tokens = {const_cast<T *>(static_cast<const T *>(a.tokens)), 1, 1, a.num_slots, a.k, a.tokens_stride},
        .weights = {const_cast<T *>(static_cast<const T *>(a.weights)), 1, a.num_experts, matrix.rows, matrix.cols},
        .out = {static_cast<Out *>(a.out), 1, 1, a.num_slots, a.n / Epilogue::COLUMN_RATIO, a.out_stride},
        .scales = scales_of<Cfg::SCALED>(a),
        .tasks = {.tasks = reinterpret_cast<const int4 *>(a.tasks), .num_tasks_ptr = a.num_tasks_ptr, .num_tasks = a.num_tasks,
                  .block_rows = a.block_rows},
        .gate = hook_params<Gate>(a),
        .epilogue = hook_params<Epilogue>(a),
        .push = hook_params<Push>(a),
        .tokens_policy = tma::cache_policy::NORMAL,
        .weights_policy = policy_of(a.weights_policy),
    };
    const int grid = a.num_sms / Cfg::CLUSTER * Cfg::CLUSTER;
    launch_persistent(grouped_gemm<Cfg, Gate, Epilogue, Push>, globals, grid, Cfg::NUM_THREADS, Cfg::CLUSTER,
                      shared_bytes<Cfg, Out>(), stream);
}

// What a configuration offers, for the bindings and the planner.
struct gemm_variant {
    using launcher = void (*)(const gemm_args &, cudaStream_t);
    const char *name, *dtype;
    int block_m, block_n, stages, cluster, smem;
    launcher launch[2];  // [swiglu?]; nullptr: not compiled for this one
    launcher hooked[2];  // the same with a counter gate and push
    void (*prepare)();   // loads what launch[] launches
};
struct variant_list {
    const gemm_variant *variants;
    int count;
};
variant_list bf16_variants();
variant_list fp8_variants();

// SwiGLU leaves bf16 from bf16 and quantised e4m3 from e4m3.
template <class Cfg>
using activation_epilogue = std::conditional_t<Cfg::SCALED, swiglu_quantise_epilogue, swiglu_epilogue>;

template <class Cfg, bool HOOKED = false> constexpr gemm_variant make_variant(const char *name) {
    using act = activation_epilogue<Cfg>;
    gemm_variant v{name, Cfg::SCALED ? "e4m3" : "bf16", Cfg::BLOCK_M, Cfg::BLOCK_N, Cfg::STAGES, Cfg::CLUSTER,
                   shared_bytes<Cfg, bf16>(), {}, {}, {}};
    v.launch[0] = launch_grouped_gemm<Cfg, no_gate, plain_epilogue, no_push>;
    // A scale covers 256 accumulator columns of one warpgroup: narrower tiles have no quantised form.
    constexpr bool ACTIVATED = !Cfg::SCALED || Cfg::WG_COLS == 256;
    if constexpr (ACTIVATED) v.launch[1] = launch_grouped_gemm<Cfg, no_gate, act, no_push>;
    v.prepare = [] {
        prepare_grouped_gemm<Cfg, plain_epilogue>();
        if constexpr (ACTIVATED) prepare_grouped_gemm<Cfg, act>();
    };
    if constexpr (HOOKED) {
        v.hooked[0] = launch_grouped_gemm<Cfg, counter_gate, plain_epilogue, counter_push>;
        v.hooked[1] = launch_grouped_gemm<Cfg, counter_gate, act, counter_push>;
    }
    return v;
}

}  // namespace moe_tk
