// The task table of a plain grouped GEMM, on the device.
#include "grouped_gemm.cuh"

namespace moe_tk {

namespace {

constexpr int SUPER_ROWS = 8, BUILD_THREADS = 128;

// One block for each group. A group's tasks begin at (row blocks before it) * (column blocks): no scan is needed.
__global__ __launch_bounds__(BUILD_THREADS) void build_tasks_kernel(const task_args a) {
    const int group = blockIdx.x, first = a.group_offsets[group] / a.block_m, end = a.group_offsets[group + 1] / a.block_m;
    const int rows = a.group_rows ? a.group_rows[group] : (end - first) * a.block_m;
    for (int b = threadIdx.x; b < end - first; b += BUILD_THREADS) a.block_rows[first + b] = min(a.block_m, rows - b * a.block_m);
    int4 *tasks = reinterpret_cast<int4 *>(a.tasks) + first * a.num_col_blocks;
    for (int i = threadIdx.x; i < (end - first) * a.num_col_blocks; i += BUILD_THREADS) {
        const int super = i / (SUPER_ROWS * a.num_col_blocks), in_super = i - super * SUPER_ROWS * a.num_col_blocks;
        const int height = min(int(SUPER_ROWS), end - first - super * SUPER_ROWS);
        const int col = in_super / height, step = in_super - col * height;
        tasks[i] = make_int4(group / a.num_experts, group % a.num_experts,
                             first + super * SUPER_ROWS + (col % 2 ? height - 1 - step : step), col);
    }
    if (group == a.num_groups - 1 && threadIdx.x == 0) *a.num_tasks = end * a.num_col_blocks;
}

}  // namespace

void build_tasks(const task_args &args, cudaStream_t stream) {
    build_tasks_kernel<<<args.num_groups, BUILD_THREADS, 0, stream>>>(args);
    check_cuda(cudaGetLastError(), "build_tasks launch");
}

}  // namespace moe_tk
