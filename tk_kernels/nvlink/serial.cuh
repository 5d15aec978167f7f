// The serial pattern's own two kernels: all multiprocessors place rows, then (after two plain GEMMs) all combine. What a rank shows
// to others is the same as in the fused pattern, so ranks that run one and ranks that run the other can meet in a call.
#pragma once

#include "combine.cuh"
#include "row_sources.cuh"

namespace moe_tk::nvlink {

// T: bf16 or fp8e4m3.
template <class T> struct place_params {
    const T *tokens;  // [num_tokens, H] of this rank; e4m3: nullptr, own rows are sent like all others
    T *gathered;      // [slots, H]
    const int *counts, *job_order, *slots;
    float *scales = nullptr;  // e4m3: [H / 128, stride], of which a row has one column
    int64_t stride = 0;       // slots
};

// A warp of place_all. Each row is read once, where its owner has sent it or from this rank's own tensor, and written to all its
// slots, in e4m3 with the scales behind it. job_order serves as the list of rows; here their order does not matter.
template <class T> class row_placer {
  public:
    __device__ row_placer(const call_view &c, const place_params<T> &p)
        : c_(c), p_(p), lane_(kittens::laneid()), vectors_(c.hidden * int(sizeof(T)) / 16) {}

    // Few rows are cut into slices, so that all warps have something.
    __device__ void run() const {
        const int num_rows = __ldg(p_.counts + COUNT_JOBS), warps = gridDim.x * blockDim.x / 32;
        const int slices = max(1, min(vectors_ / STEP, warps / max(1, num_rows))), units = vectors_ / UNIT;
        for (int item = int((blockIdx.x * blockDim.x + threadIdx.x) / 32); item < num_rows * slices; item += warps) {
            const int row = __ldg(p_.job_order + item / slices), slice = item % slices;
            place(row, slice * units / slices * UNIT, (slice + 1) * units / slices * UNIT);
        }
    }

  private:
    static constexpr int BATCH = 4, STEP = 32 * BATCH;  // vectors of 16 bytes that a lane, a warp has in flight
    static constexpr bool SCALED = sizeof(T) == 1;
    static constexpr int UNIT = SCALED ? 8 : 1;  // vectors that are not cut: those of a scale
    static_assert(STEP / UNIT <= 32 || !SCALED, "a lane for each scale of a step");

    __device__ void place(int row, int first, int last) const {
        const uint8_t *bytes = row_of_pair(c_, p_.tokens, row * c_.top_k);
        const uint4 *from = reinterpret_cast<const uint4 *>(bytes);
        const float *scales = reinterpret_cast<const float *>(bytes + c_.hidden);
        const int mine = lane_ < c_.top_k ? __ldg(p_.slots + int64_t(row) * c_.top_k + lane_) : -1;
        const uint32_t present = __ballot_sync(0xffffffff, mine >= 0);
        for (int at = first; at < last; at += STEP) {
            uint4 v[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u)
                if (at + 32 * u + lane_ < last) v[u] = __ldcg(from + at + 32 * u + lane_);
            const int block = at / UNIT + lane_;  // of 128 columns
            const bool has_scale = SCALED && lane_ < STEP / UNIT && block * UNIT < last;
            const float scale = has_scale ? __ldcg(scales + block) : 0.0f;
            for (uint32_t left = present; left != 0; left &= left - 1) {
                const int slot = __shfl_sync(0xffffffff, mine, __ffs(left) - 1);
                uint4 *to = reinterpret_cast<uint4 *>(p_.gathered + int64_t(slot) * c_.hidden) + at + lane_;
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
                    if (at + 32 * u + lane_ < last) to[32 * u] = v[u];
                if (has_scale) p_.scales[block * p_.stride + slot] = scale;
            }
        }
    }

    const call_view &c_;
    const place_params<T> &p_;
    const int lane_, vectors_;
};

// Roles: every warp places rows. No block waits for another one.
constexpr int PLACE_THREADS = 1024;
template <class T>
__global__ __launch_bounds__(PLACE_THREADS, 1) void place_all(const __grid_constant__ call_view c,
                                                             const __grid_constant__ place_params<T> p) {
    kittens::wait_prerequisite_grids();  // the tables and the rows
    row_placer<T>(c, p).run();
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
