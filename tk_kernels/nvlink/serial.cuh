// The serial pattern's own two kernels: all multiprocessors place rows, then (after two plain GEMMs) all combine. What a rank shows
// to others is the same as in the fused pattern, so ranks that run one and ranks that run the other can meet in a call.
#pragma once

#include "combine.cuh"
#include "row_sources.cuh"

namespace moe_tk::nvlink {

struct place_params {
    const bf16 *tokens;  // [num_tokens, H] of this rank
    bf16 *gathered;      // [slots, H]
    const int *counts, *job_order, *slots;
};

// A warp of place_all. Each row is read once, where its owner has sent it or from this rank's own tensor, and written to all its
// slots. job_order serves as the list of rows; here their order does not matter.
class row_placer {
  public:
    __device__ row_placer(const call_view &c, const place_params &p)
        : c_(c), p_(p), lane_(kittens::laneid()), vectors_(c.hidden / 8) {}

    // Few rows are cut into slices, so that all warps have something.
    __device__ void run() const {
        const int num_rows = __ldg(p_.counts + COUNT_JOBS), warps = gridDim.x * blockDim.x / 32;
        const int slices = max(1, min(vectors_ / STEP, warps / max(1, num_rows)));
        for (int item = int((blockIdx.x * blockDim.x + threadIdx.x) / 32); item < num_rows * slices; item += warps) {
            const int row = __ldg(p_.job_order + item / slices), slice = item % slices;
            place(row, find(row), slice * vectors_ / slices, (slice + 1) * vectors_ / slices);
        }
    }

  private:
    static constexpr int BATCH = 4, STEP = 32 * BATCH;  // vectors of 16 bytes that a lane, a warp has in flight

    __device__ const uint4 *find(int row) const {
        return reinterpret_cast<const uint4 *>(row_of_pair(c_, p_.tokens, row * c_.top_k));
    }
    __device__ void place(int row, const uint4 *from, int first, int last) const {
        const int mine = lane_ < c_.top_k ? __ldg(p_.slots + int64_t(row) * c_.top_k + lane_) : -1;
        const uint32_t present = __ballot_sync(0xffffffff, mine >= 0);
        for (int at = first; at < last; at += STEP) {
            uint4 v[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (at + 32 * u + lane_ < last) v[u] = __ldcg(from + at + 32 * u + lane_);
            for (uint32_t left = present; left != 0; left &= left - 1) {
                const int slot = __shfl_sync(0xffffffff, mine, __ffs(left) - 1);
                uint4 *to = reinterpret_cast<uint4 *>(p_.gathered + int64_t(slot) * c_.hidden) + at + lane_;
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
                    if (at + 32 * u + lane_ < last) to[32 * u] = v[u];
            }
        }
    }

    const call_view &c_;
    const place_params &p_;
    const int lane_, vectors_;
};

// Roles: every warp places rows. No block waits for another one.
constexpr int PLACE_THREADS = 1024;
__global__ __launch_bounds__(PLACE_THREADS, 1) void place_all(const __grid_constant__ call_view c,
                                                             const __grid_constant__ place_params p) {
    kittens::wait_prerequisite_grids();  // the tables and the rows
    row_placer(c, p).run();
}

// Roles: every warp takes from the list of jobs and own tokens. A job waits for nothing here, and the jobs of a group stand before
// its tokens, so blocks that start late are waited for by nobody.
constexpr int COMBINE_THREADS = 640, COMBINE_BATCH = 4;
__global__ __launch_bounds__(COMBINE_THREADS, 1) void combine_all(const __grid_constant__ call_view c,
                                                                 const __grid_constant__ combine_params p) {
    stamps_off();
    combine_and_reduce<COMBINE_BATCH, false>(c, p);
}

}  // namespace moe_tk::nvlink
