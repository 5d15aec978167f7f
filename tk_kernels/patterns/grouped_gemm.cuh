// Launches of the grouped GEMM: run-time arguments to globals, shared memory, clusters.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#include "../engine/grouped_gemm.cuh"
#include "../hooks/epilogue.cuh"
#include "../hooks/noop.cuh"

namespace moe_tk {

// Plain pointers and sizes, as bindings pass them. Device pointers unless said.
struct gemm_args {
    const void *tokens, *weights;  // (slots, k) and (experts, n, k), rows contiguous
    void *out;                     // (slots, n) or, with SwiGLU, (slots, n / 2)
    int num_slots, n, k, num_experts;
    int64_t tokens_stride, out_stride;  // elements between rows
    const int *group_offsets;           // (num_groups + 1,)
    int num_groups;
    const int *tasks, *num_tasks_ptr;  // (num_tasks, 4) and a device count, or nullptr: derived from group_offsets
    int num_tasks;
    const int *block_rows;  // (row blocks,) or nullptr
    float alpha, beta, limit;
    const float *slot_weight;  // (slots,) or nullptr
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

template <class Tasks> typename Tasks::params task_params(const gemm_args &a, int block_m, int block_n);
template <> inline table_tasks::params task_params<table_tasks>(const gemm_args &a, int, int) {
    return {.tasks = reinterpret_cast<const int4 *>(a.tasks), .num_tasks_ptr = a.num_tasks_ptr, .num_tasks = a.num_tasks,
            .block_rows = a.block_rows, .num_row_blocks = 0};
}
template <> inline offset_tasks::params task_params<offset_tasks>(const gemm_args &a, int block_m, int block_n) {
    return {.group_offsets = a.group_offsets, .num_groups = a.num_groups, .num_experts = a.num_experts,
            .num_col_blocks = ceil_div(a.n, block_n), .block_m = block_m, .block_rows = a.block_rows};
}

template <class Epilogue> typename Epilogue::params epilogue_params(const gemm_args &) { return {}; }
template <> inline swiglu_epilogue::params epilogue_params<swiglu_epilogue>(const gemm_args &a) {
    return {.alpha = a.alpha, .beta = a.beta, .limit = a.limit, .slot_weight = a.slot_weight};
}

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

template <class Cfg, class Tasks, class Epilogue> void launch_grouped_gemm(const gemm_args &a, cudaStream_t stream) {
    if (a.num_slots == 0 || a.n == 0) return;  // nothing to write, and TMA has no descriptor for an empty tensor
    using T = typename Cfg::T;
    using G = gemm_globals<Cfg, Tasks, no_gate, Epilogue, no_push>;
    const G globals{
        .tokens = {const_cast<T *>(static_cast<const T *>(a.tokens)), 1, 1, a.num_slots, a.k, a.tokens_stride},
        .weights = {const_cast<T *>(static_cast<const T *>(a.weights)), 1, a.num_experts, a.n, a.k},
        .out = {static_cast<bf16 *>(a.out), 1, 1, a.num_slots, a.n / Epilogue::COLUMN_RATIO, a.out_stride},
        .tasks = task_params<Tasks>(a, Cfg::BLOCK_M, Cfg::BLOCK_N),
        .gate = {},
        .epilogue = epilogue_params<Epilogue>(a),
        .push = {},
        .tokens_policy = tma::cache_policy::NORMAL,
        .weights_policy = policy_of(a.weights_policy),
    };
    const int grid = a.num_sms / Cfg::CLUSTER * Cfg::CLUSTER;
    launch_persistent(grouped_gemm<Cfg, Tasks, no_gate, Epilogue, no_push>, globals, grid, Cfg::NUM_THREADS, Cfg::CLUSTER,
                      shared_bytes<Cfg>(), stream);
}

// What a configuration offers, for the bindings and the planner.
struct gemm_variant {
    const char *name;
    int block_m, block_n, stages, cluster, smem;
    void (*launch[2][2])(const gemm_args &, cudaStream_t);  // [table?][swiglu?]
};
extern const gemm_variant bf16_variants[];
extern const int num_bf16_variants;

template <class Cfg> constexpr gemm_variant make_variant(const char *name) {
    return {name, Cfg::BLOCK_M, Cfg::BLOCK_N, Cfg::STAGES, Cfg::CLUSTER, shared_bytes<Cfg>(),
            {{launch_grouped_gemm<Cfg, offset_tasks, plain_epilogue>, launch_grouped_gemm<Cfg, offset_tasks, swiglu_epilogue>},
             {launch_grouped_gemm<Cfg, table_tasks, plain_epilogue>, launch_grouped_gemm<Cfg, table_tasks, swiglu_epilogue>}}};
}

}  // namespace moe_tk
