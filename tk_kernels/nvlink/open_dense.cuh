// First launch of a dense call: one block agrees with the other ranks and writes the identity tables.
#pragma once

#include "dense.cuh"
#include "outcome.cuh"

namespace moe_tk::nvlink {

constexpr int DENSE_THREADS = 1024, SUPERTILE_ROWS = 8;

struct open_dense_globals {
    dense_view view;
    uint64_t signature;
    int num_tokens, refused;
    int blocks, block_m, col_blocks;  // row blocks of a part, their rows, column blocks
    int first;                        // the part of rank (rank + first) is computed first, then the following ones
};

// ORDER planes: a rank posts its header when its last call is done, so whoever has seen it may write into its planes.
__device__ __forceinline__ void post_header(const open_dense_globals &g, uint32_t epoch) {
    const call_view &c = g.view.call;
    if (threadIdx.x >= c.world) return;
    const int to = threadIdx.x;
    *c.header(to, epoch & 1, c.rank) = {g.signature, g.num_tokens, g.refused};
    fence_sys();
    store_release_sys(c.posted(to, c.rank), epoch);
}

// Task order: part by part; in a part supertiles of 8 row blocks, column by column, every second column upwards.
__device__ __forceinline__ void write_dense_tables(const open_dense_globals &g) {
    const call_view &c = g.view.call;
    const int all = c.world * g.blocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < all; i += DENSE_THREADS) {
        g.view.done[i] = 0;
        g.view.block_rows[i] = min(g.block_m, g.num_tokens - i % g.blocks * g.block_m);
    }
    for (int place = warp; place < all; place += DENSE_THREADS / 32) {
        const int part = place / g.blocks, block = place % g.blocks, rank = (c.rank + g.first + part) % c.world;
        const int tile = block / SUPERTILE_ROWS * SUPERTILE_ROWS, height = min(SUPERTILE_ROWS, g.blocks - tile), down = block - tile;
        int4 *tasks = g.view.tasks + int64_t(part * g.blocks + tile) * g.col_blocks;
        for (int col = lane; col < g.col_blocks; col += 32)
            tasks[col * height + (col % 2 ? height - 1 - down : down)] = make_int4(rank, 0, rank * g.blocks + block, col);
    }
}

// By warp 0: waits for all headers; whether the call can be computed, the same on all ranks that hear of all.
__device__ __forceinline__ bool agree(const call_view &c, uint32_t epoch) {
    const int lane = threadIdx.x;
    uint4 header{};
    bool ok = true;
    if (lane < c.world) {
        ok = spin_until(c.posted(c.rank, lane), epoch, c, {phase_id::exchange, role_id::send, lane, lane});
        header = __ldcg(reinterpret_cast<const uint4 *>(c.header(c.rank, epoch & 1, lane)));
    }
    if (!__all_sync(0xffffffff, ok)) return false;
    const verdict v = judge(c, lane, uint64_t(header.y) << 32 | header.x, int(header.z), int(header.w));
    if (v.reason != void_reason::none && lane == 0) {
        c.host->void_rank = v.rank, c.host->void_value = v.value;
        store_release_sys(&c.host->void_reason, uint32_t(v.reason));
    }
    return v.reason == void_reason::none;
}

__global__ __launch_bounds__(DENSE_THREADS, 1) void open_dense(const __grid_constant__ open_dense_globals g) {
    const call_view &c = g.view.call;
    const uint32_t epoch = *c.epoch_ptr + 1;
    post_header(g, epoch);
    write_dense_tables(g);
    if (threadIdx.x < 32) {
        const bool ok = agree(c, epoch);
        if (threadIdx.x == 0) {
            g.view.words[DENSE_TASKS] = ok ? c.world * g.blocks * g.col_blocks : 0;
            g.view.words[DENSE_COMPUTED] = ok;
            g.view.words[DENSE_NEXT_PUSH] = g.view.words[DENSE_NEXT_ROW] = 0;
        }
    }
    __syncthreads();  // all threads have read the old epoch
    if (threadIdx.x == 0) *g.view.epoch = epoch;
}

// NaN for every element of `out` unless the call has come to a result.
__global__ void seal_dense(const __grid_constant__ call_view c, uint4 *out, int64_t vectors) {
    if (block_call_is_good(c)) return;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += int64_t(gridDim.x) * blockDim.x)
        out[i] = {TWO_NANS, TWO_NANS, TWO_NANS, TWO_NANS};
}

}  // namespace moe_tk::nvlink
