// Rows to their slots: every warp of every multiprocessor reads a row once and writes it to all its slots, for a GEMM 1 that loads rows
// by TMA. In the serial pattern, and for fused e4m3 GEMMs of many rows.
#pragma once

#include "row_sources.cuh"

namespace moe_tk::nvlink {

// Where the rows of slots lie, and in e4m3 their scales: those of SCALE_RUN_ROWS slots for one block of 128 columns are one run.
template <class T> struct slot_rows {
    static constexpr int SCALE_RUN_ROWS = 128;
    T *rows;
    int64_t stride;  // elements between rows
    float *scales = nullptr;
    int64_t block_stride = 0, run_stride = SCALE_RUN_ROWS;  // floats between blocks of 128 columns, and between runs of slots
    __device__ __forceinline__ T *row(int slot) const { return rows + slot * stride; }
    __device__ __forceinline__ float *scale(int slot, int block) const {
        return scales + block * block_stride + slot / SCALE_RUN_ROWS * run_stride + slot % SCALE_RUN_ROWS;
    }
};

// The rows of a fused call: GEMM 2 may write outputs of one row block while GEMM 1 still reads another, so a row lies in the place of its
// own output, which is written when all column blocks of the row block have been activated. The output [H] bf16 has room for the row, H
// bytes, and H bytes more: there slot i of a row block of 128 has the scales of all 128 rows for block i of 128 columns.
// ORDER tiles_activated: what reads a row block comes before its last count_push; what writes there, behind activated_gate.
template <class T> slot_rows<T> rows_in_outputs(void *expert_out, int hidden) {
    using rows = slot_rows<T>;
    const int64_t stride = 2 * int64_t(hidden), floats = stride / int(sizeof(float));
    return {.rows = static_cast<T *>(expert_out), .stride = stride, .scales = reinterpret_cast<float *>(static_cast<char *>(expert_out) + hidden),
            .block_stride = floats, .run_stride = rows::SCALE_RUN_ROWS * floats};
}
// Whether they fit: a run of scales into half an output, and no more blocks of columns than slots in a run.
inline bool rows_fit_outputs(int hidden) {
    constexpr int RUN = slot_rows<kittens::fp8e4m3>::SCALE_RUN_ROWS;
    return hidden >= RUN * int(sizeof(float)) && hidden <= RUN * RUN;
}

// T: bf16 or fp8e4m3.
template <class T> struct place_params {
    const T *tokens;  // [num_tokens, H] of this rank; e4m3: nullptr, own rows are sent like all others
    slot_rows<T> to;
    const int *counts, *job_order, *slots;
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
                uint4 *to = reinterpret_cast<uint4 *>(p_.to.row(slot)) + at + lane_;
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
                    if (at + 32 * u + lane_ < last) to[32 * u] = v[u];
                if (has_scale) *p_.to.scale(slot, block) = scale;
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

}  // namespace moe_tk::nvlink
