// Push and finish of GEMM+RS: tiles are stored into the plane of this rank at the owner of their rows, and the owner adds the
// planes of all ranks in rank order, in fp32: bitwise equal from run to run.
#pragma once

#include "../hooks/noop.cuh"
#include "combine.cuh"
#include "dense.cuh"

namespace moe_tk::nvlink {

// ORDER tiles_pushed: the storers have waited for their bytes and met; fence.sys, the election's acq_rel, then st.release.sys
// of the one that finished the row block's last column block; reduce_finish acquires.
struct owner_push {
    static constexpr bool NOOP = false;
    struct params {
        call_view call;
        uint32_t *done;  // [R * blocks] finished column blocks
        int blocks, col_blocks;
    };
    __device__ static void publish(const params &p, const tile_task &t) {
        const call_view &c = p.call;
        fence_sys();
        if (fetch_add_acq_rel_gpu(p.done + t.row_block, 1u) + 1 != uint32_t(p.col_blocks)) return;
        fence_sys();
        store_release_sys(block_flag(c, t.segment, c.rank, t.row_block - t.segment * p.blocks), *c.epoch_ptr);
    }
};

struct reduce_finish {
    using gate = no_gate;
    using push = owner_push;
    struct params {
        const uint32_t *words;
        uint32_t *next;
        bf16 *out;  // [num_tokens, N]
        int num_tokens, block_rows;
    };
    static constexpr int SLICE = 2048;  // columns of an item, at most: the last ones of a call are spread over all warps
    static constexpr int ENOUGH = 4096;  // items: fewer are cut finer

    // Own rows in the order in which this rank computes them, which is last. Dispensed, so that any number of warps helps.
    template <int> __device__ static void run(const call_view &c, const params &p) {
        const bool computed = __ldcg(p.words + DENSE_COMPUTED) != 0;
        const uint32_t epoch = *c.epoch_ptr;
        const int steps = (c.hidden + SLICE_STEP - 1) / SLICE_STEP;
        const int slices = max((c.hidden + SLICE - 1) / SLICE, min(steps, ENOUGH / max(p.num_tokens, 1)));
        for (int item = take_item(p.next); item < p.num_tokens * slices;) {
            const int token = item / slices, slice = item % slices;
            const column_slice columns{slice * steps / slices * SLICE_STEP, min(c.hidden, (slice + 1) * steps / slices * SLICE_STEP)};
            item = take_item(p.next);
            if (computed) reduce(c, p, token, columns, epoch);
            else fill_nan(p.out + int64_t(token) * c.hidden, columns);
        }
    }

  private:
    __device__ static __forceinline__ void reduce(const call_view &c, const params &p, int token, column_slice columns, uint32_t epoch) {
        const int lane = kittens::laneid(), block = token / p.block_rows;
        bool ok = true;
        if (lane < c.world) ok = spin_until(block_flag(c, c.rank, lane, block), epoch, c, {phase_id::reduce, role_id::reduce, block, lane});
        bf16 *to = p.out + int64_t(token) * c.hidden;
        ok = ok && load_relaxed_sys(&c.control(c.rank)->abort_flag) == 0;
        if (!__all_sync(0xffffffff, ok)) {
            report_told(c);
            return fill_nan(to, columns);
        }
        __syncwarp();  // what each lane has acquired holds for all lanes
        add_planes(c, c.plane<bf16>(c.rank, 0, token), columns, to);
    }
    // The loads of STEPS column steps are in flight together, of two ranks: one warp keeps up with a GEMM's block.
    __device__ static __forceinline__ void add_planes(const call_view &c, const bf16 *first_plane, column_slice columns, bf16 *to) {
        constexpr int STEPS = 4, AHEAD = 2;
        const int64_t apart = int64_t(c.max_tokens) * c.hidden * sizeof(bf16);
        const auto load = [](const char *from) { return __ldcg(reinterpret_cast<const uint4 *>(from)); };
        const bool both = c.world > 1;
        int left = columns.last - columns.first - kittens::laneid() * 8;
        const char *from = reinterpret_cast<const char *>(first_plane + columns.last - left);
        uint4 *out = reinterpret_cast<uint4 *>(to + columns.last - left);
        for (; left > 0; left -= 256 * STEPS, from += 512 * STEPS, out += 32 * STEPS) {
            uint4 v[STEPS][AHEAD];
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
                v[u][0] = v[u][1] = {0, 0, 0, 0};
                if (left <= 256 * u) continue;
                v[u][0] = load(from + 512 * u);
                if (both) v[u][1] = load(from + apart + 512 * u);
            }
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
                if (left <= 256 * u) continue;
                float sum[8] = {};
                add_scaled(sum, v[u][0], 1.0f);
                add_scaled(sum, v[u][1], 1.0f);
#pragma unroll 1
                for (int p = AHEAD; p < c.world; ++p) add_scaled(sum, load(from + p * apart + 512 * u), 1.0f);
                out[32 * u] = to_bf16(sum);
            }
        }
    }
};

}  // namespace moe_tk::nvlink
