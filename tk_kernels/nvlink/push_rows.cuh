// Mover of AG+GEMM: sends this rank's rows to all others, in the order in which they will compute them, with plain stores from
// registers: one warp of every block. And the gate that waits for them.
#pragma once

#include "../hooks/noop.cuh"
#include "combine.cuh"
#include "dense.cuh"

namespace moe_tk::nvlink {

// ORDER rows_pushed: acquires what the last sender of the row block releases. Own rows are read where they are.
struct pushed_gate {
    static constexpr bool NOOP = false;
    struct params {
        call_view call;
        int blocks;  // row blocks of a part
    };
    __device__ static bool ready(const params &p, const tile_task &t) {
        const call_view &c = p.call;
        if (t.segment == c.rank) return true;
        const uint32_t *flag = block_flag(c, c.rank, t.segment, t.row_block - t.segment * p.blocks);
        if (!protocol::reached(load_acquire_sys(flag), *c.epoch_ptr)) return false;
        kittens::fence_proxy_async_global();  // visible to this thread -> to its TMA loads
        return true;
    }
    __device__ static void wait(const params &p, const tile_task &t) {
        const call_view &c = p.call;
        if (t.segment == c.rank) return;
        const int block = t.row_block - t.segment * p.blocks;
        spin_until(block_flag(c, c.rank, t.segment, block), *c.epoch_ptr, c, {phase_id::gemm1, role_id::compute, block, t.segment});
        kittens::fence_proxy_async_global();
    }
};

struct push_mover {
    using gate = pushed_gate;
    using push = no_push;
    static constexpr bool LOADS = false;
    struct params {
        const uint4 *x;       // [num_tokens, H] of this rank
        const uint32_t *words;
        uint32_t *sent, *next;  // rows of each (rank, row block); dispenser
        int num_tokens, block_rows, blocks, item_rows;  // block_rows is a multiple of item_rows
    };
    struct shared {};
    __device__ static void init(shared &) {}

    // All ranks begin with their own part and go on with the following ones, so rank - 1 is the first to want ours: each rank
    // sends to another one at a time.
    __device__ static void run(const call_view &c, const params &p, shared &) {
        if (__ldcg(p.words + DENSE_COMPUTED) == 0) return;
        const uint32_t epoch = *c.epoch_ptr;
        const int chunks = (p.num_tokens + p.item_rows - 1) / p.item_rows, items = chunks * (c.world - 1);
        for (int item = take_item(p.next); item < items;) {
            const int to = (c.rank + c.world - 1 - item / chunks) % c.world, first = item % chunks * p.item_rows;
            item = take_item(p.next);
            if (load_relaxed_sys(&c.control(c.rank)->abort_flag) != 0) return;
            const int rows = min(p.item_rows, p.num_tokens - first), vectors = c.hidden / 8;
            copy(p.x + int64_t(first) * vectors, reinterpret_cast<uint4 *>(c.plane<bf16>(to, c.rank, first)), rows * vectors);
            publish(c, p, to, first / p.block_rows, rows, epoch);
        }
    }

  private:
    __device__ static __forceinline__ void copy(const uint4 *from, uint4 *to, int vectors) {
        constexpr int FLIGHT = 8;  // loads of a lane under way at a time
        for (int first = kittens::laneid(); first < vectors + kittens::laneid(); first += 32 * FLIGHT) {
            uint4 v[FLIGHT];
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u)
                if (first + 32 * u < vectors) v[u] = __ldcg(from + first + 32 * u);
#pragma unroll
            for (int u = 0; u < FLIGHT; ++u)
                if (first + 32 * u < vectors) to[first + 32 * u] = v[u];
        }
    }
    // ORDER rows_pushed: the lanes' stores, fence.sys, the election's acq_rel, then the last one's st.release.sys.
    __device__ static __forceinline__ void publish(const call_view &c, const params &p, int to, int block, int rows, uint32_t epoch) {
        fence_sys();
        __syncwarp();
        if (kittens::laneid() == 0) {
            const int all = min(p.block_rows, p.num_tokens - block * p.block_rows);
            const uint32_t sent = fetch_add_acq_rel_gpu(p.sent + to * p.blocks + block, uint32_t(rows)) + rows;
            if (sent == uint32_t(all)) {
                fence_sys();
                store_release_sys(block_flag(c, to, c.rank, block), epoch);
            }
        }
        __syncwarp();
    }
};

}  // namespace moe_tk::nvlink
