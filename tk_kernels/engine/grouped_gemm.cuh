// Persistent grouped GEMM on SM90: out[slot, :] = epilogue(tokens[slot, :] * weights[expert(slot)]^T).
// docs/engine.md draws the pipeline and gives the arrive counts.
#pragma once

#include "../platform/stamps.cuh"
#include "gemm_memory.cuh"
#include "load_tasks.cuh"

namespace moe_tk {

enum named_barrier_id { BAR_STORERS = 1 };

// ---- consumers: one warpgroup each --------------------------------------------------------------------------------
// Each consumer warp tells every block of the cluster that it has finished with a stage.
template <class Cfg, class Shared> __device__ __forceinline__ void finish_inputs(Shared &s, int stage) {
    const int lane = laneid();
    if constexpr (Cfg::SCALED) __syncwarp();  // every lane has read its scales
    if constexpr (Cfg::CLUSTER == 1) {
        if (lane < WARP_ARRIVALS) arrive(s.inputs_finished[stage]);
    } else if constexpr (WARP_ARRIVALS > 1) {
        for (int block = 0; block < Cfg::CLUSTER; ++block) tma::cluster::arrive(s.inputs_finished[stage], block);
    } else if (lane < Cfg::CLUSTER) {
        tma::cluster::arrive(s.inputs_finished[stage], lane);
    }
}

// Waits until a stage is filled, by TMA alone or by copies too: those are behind the generic proxy, wgmma reads behind the other.
template <class Cfg, class Shared> __device__ __forceinline__ void await_inputs(Shared &s, const ring_position<Cfg::STAGES> &at) {
    wait(s.inputs_arrived[at.stage], at.phase);
    if constexpr (Cfg::LOADERS > 1) fence_proxy_async_shared();
}

template <class Cfg, class Shared, int N>
__device__ __forceinline__ void multiply(Shared &s, ring_position<Cfg::STAGES> &at, int num_k_blocks, int wg, rt_fl<16, N> &acc) {
    int previous = 0;
    warpgroup::mma_fence(acc);
    for (int k = 0; k < num_k_blocks; ++k) {
        await_inputs<Cfg>(s, at);
        auto &in = s.inputs[at.stage];
        warpgroup::mma_fence();
#pragma unroll
        for (int p = 0; p < Cfg::PANELS; ++p)
            warpgroup::mma_ABt(acc, in.a[p].template row_slab<Cfg::WG_ROWS>(wg / Cfg::WGS_N),
                               in.b[p].template row_slab<Cfg::WG_COLS>(wg % Cfg::WGS_N), k + p > 0);
        warpgroup::mma_commit_group();
        if (k > 0) {
            warpgroup::mma_async_wait<1>();
            finish_inputs<Cfg>(s, previous);
        }
        previous = at.stage;
        at.advance();
    }
    warpgroup::mma_async_wait<0>(acc);
    finish_inputs<Cfg>(s, previous);
}

// acc += partial * scale, where rows have row_scale[0 | 1] and the groups of 8 columns alternate between col_scale.x and .y.
template <int FIRST_TILE, int N, int PART>
__device__ __forceinline__ void promote(rt_fl<16, N> &acc, const rt_fl<16, PART> &partial, const float (&row_scale)[2],
                                        float2 col_scale) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float scale = row_scale[k % 2] * (k / 2 ? col_scale.y : col_scale.x);
#pragma unroll
        for (int t = 0; t < PART / 16; ++t) {
            const float2 x = partial.tiles[0][t].data[k];
            float2 &sum = acc.tiles[0][FIRST_TILE + t].data[k];
            sum.x = fmaf(x.x, scale, sum.x), sum.y = fmaf(x.y, scale, sum.y);
        }
    }
}

// 128 columns of one stage, from zero to the end.
template <class Cfg, int PART_IDX, class Stage, int PART>
__device__ __forceinline__ void multiply_part(Stage &in, int wg, rt_fl<16, PART> &partial) {
    warpgroup::mma_fence(partial);
    warpgroup::mm_ABt(partial, in.a[0].template row_slab<Cfg::WG_ROWS>(wg / Cfg::WGS_N),
                      in.b[0].template row_slab<PART>((wg % Cfg::WGS_N) * (Cfg::WG_COLS / PART) + PART_IDX));
    warpgroup::mma_commit_group();
    warpgroup::mma_async_wait<0>(partial);
}

// e4m3: each 128 of K is summed by the tensor core, then added in fp32 with its scales.
template <class Cfg, class G, class Shared, int N>
__device__ __forceinline__ void multiply_scaled(const G &g, Shared &s, ring_position<Cfg::STAGES> &at, int num_k_blocks, int wg,
                                                const tile_task &t, scale_place<Cfg> &run, rt_fl<16, N> &acc) {
    constexpr int PART = Cfg::SCALE_BLOCK, PARTS = N / PART;
    const int row = (wg / Cfg::WGS_N) * Cfg::WG_ROWS + warpgroup::warp_in_group() * 16 + laneid() / 4;
    const int first = t.col_block * (Cfg::BLOCK_N / PART) + (wg % Cfg::WGS_N) * PARTS;
    const int last = g.scales.col_blocks - 1, apart = min(first + 1, last) > min(first, last) ? num_k_blocks : 0;  // of two parts
    int col_scale_at = (t.expert * g.scales.col_blocks + min(first, last)) * num_k_blocks;  // an index: registers are short here
#pragma unroll
    for (int i = 0; i < N / 16; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) acc.tiles[0][i].data[k] = float2{0.0f, 0.0f};
    rt_fl<16, PART> partial;
    for (int k = 0; k < num_k_blocks; ++k, at.advance()) {
        await_inputs<Cfg>(s, at);  // its fence waits for this thread's loads: none may be under way
        float2 col_scale = __ldg(g.scales.weights + col_scale_at);
        auto &in = s.inputs[at.stage];
        const auto &scales = s.token_scales[run.place];
        const int scale_at = row * Cfg::SCALE_RUN + k % Cfg::SCALE_RUN;
        const float row_scale[2] = {scales[scale_at], scales[scale_at + 8 * Cfg::SCALE_RUN]};
        if (run.ends(k, num_k_blocks)) run.advance();
        multiply_part<Cfg, 0>(in, wg, partial);
        if constexpr (PARTS == 1) finish_inputs<Cfg>(s, at.stage);
        promote<0>(acc, partial, row_scale, col_scale);
        if constexpr (PARTS == 2) {
            col_scale = __ldg(g.scales.weights + col_scale_at + apart);
            multiply_part<Cfg, 1>(in, wg, partial);
            finish_inputs<Cfg>(s, at.stage);
            promote<PART / 16>(acc, partial, row_scale, col_scale);
        }
        ++col_scale_at;
    }
}

// A warpgroup without rows lets the stages pass.
template <class Cfg, class Shared>
__device__ __forceinline__ void skip(Shared &s, ring_position<Cfg::STAGES> &at, int num_k_blocks) {
    for (int k = 0; k < num_k_blocks; ++k, at.advance()) {
        wait(s.inputs_arrived[at.stage], at.phase);
        finish_inputs<Cfg>(s, at.stage);
    }
}

template <class Cfg, class Epilogue, int CHUNK = 0, class Shared, int N>
__device__ __forceinline__ void emit_chunks(const typename Epilogue::params &p, Shared &s, ring_position<Cfg::OUT_STAGES> &at,
                                            const tile_task &t, int wg, const rt_fl<16, N> &acc) {
    constexpr int OUT_COLS = out_tile<typename Epilogue::out_type>::cols, COLS = N / Epilogue::COLUMN_RATIO;
    static_assert(COLS % OUT_COLS == 0, "a warpgroup's columns leave in whole output tiles");
    if constexpr (CHUNK < COLS / OUT_COLS) {
        const int row = t.row_block * Cfg::BLOCK_M + (wg / Cfg::WGS_N) * Cfg::WG_ROWS + warpgroup::warp_in_group() * 16;
        const int col = t.col_block * (Cfg::BLOCK_N / Epilogue::COLUMN_RATIO) + (wg % Cfg::WGS_N) * COLS + CHUNK * OUT_COLS;
        rt<typename Epilogue::out_type, 16, OUT_COLS> out;
        Epilogue::template chunk<CHUNK>(p, t, row, col, acc, out);
        wait(s.outputs_finished[wg][at.stage], at.phase ^ 1);
        warpgroup::store(s.outputs[wg][at.stage], out);
        fence_proxy_async_shared();
        __syncwarp();
        if (laneid() == 0) arrive(s.outputs_arrived[wg][at.stage]);
        at.advance();
        emit_chunks<Cfg, Epilogue, CHUNK + 1>(p, s, at, t, wg, acc);
    }
}

template <class Cfg, class Epilogue, class G, class Shared>
__device__ void consume_tasks(const G &g, Shared &s, int rank, int num_k_blocks, int wg) {
    ring_position<Cfg::STAGES> in;
    ring_position<Cfg::OUT_STAGES> out;
    [[maybe_unused]] scale_place<Cfg> run;
    for_each_task<Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w) {
        stamp_arrival_group(stamp_kind::input_wait, s.inputs_arrived[in.stage], in.phase, stamp_tile(w.task));
        if (!has_rows<Cfg>(w, wg)) {
            skip<Cfg>(s, in, num_k_blocks);
            if constexpr (Cfg::SCALED) run.skip(num_k_blocks);
            return stamp_lap_group(stamp_kind::skip, stamp_tile(w.task));
        }
        rt_fl<16, Cfg::WG_COLS> acc;
        if constexpr (Cfg::SCALED) multiply_scaled<Cfg>(g, s, in, num_k_blocks, wg, w.task, run, acc);
        else multiply<Cfg>(s, in, num_k_blocks, wg, acc);
        stamp_lap_group(stamp_kind::multiply, stamp_tile(w.task));
        emit_chunks<Cfg, Epilogue>(g.epilogue, s, out, w.task, wg, acc);
        stamp_lap_group(stamp_kind::emit, stamp_tile(w.task));
    });
}

// ---- storers: one warp for each consumer warpgroup, one elected lane of it works --------------------------------------
template <class Cfg, class Epilogue, class G, class Shared>
__device__ __forceinline__ void store_tile(const G &g, Shared &s, ring_position<Cfg::OUT_STAGES> at, const tile_task &t, int wg) {
    constexpr int COLS = Cfg::WG_COLS / Epilogue::COLUMN_RATIO, OUT_COLS = out_tile<typename G::Out>::cols;
    constexpr int CHUNKS = COLS / OUT_COLS;
    const int row = (wg / Cfg::WGS_N) * Cfg::WG_ROWS;
    const int col = t.col_block * (Cfg::BLOCK_N / Epilogue::COLUMN_RATIO) + (wg % Cfg::WGS_N) * COLS;
    // Rows of this warpgroup that are not padding, in slabs; the storer is called only where there is one.
    const int slabs = ceil_div(t.rows - row, Cfg::OUT_SLAB);
    int previous = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        wait(s.outputs_arrived[wg][at.stage], at.phase);
#pragma unroll
        for (int i = 0; i < Cfg::WG_ROWS / Cfg::OUT_SLAB; ++i)
            if (i < slabs)
                tma::store_async(g.out_of(t), s.outputs[wg][at.stage].template row_slab<Cfg::OUT_SLAB>(i),
                                 g.out_at(t, row + i * Cfg::OUT_SLAB, col + c * OUT_COLS));
        tma::store_commit_group();
        if (Cfg::OUT_STAGES == 1) {
            tma::store_async_read_wait<0>();
            arrive(s.outputs_finished[wg][at.stage]);
        } else if (c > 0) {
            tma::store_async_read_wait<1>();
            arrive(s.outputs_finished[wg][previous]);
        }
        previous = at.stage;
        at.advance();
    }
    if (Cfg::OUT_STAGES > 1) {
        tma::store_async_read_wait<0>();
        arrive(s.outputs_finished[wg][previous]);
    }
}

template <class Cfg, class Epilogue, class Push, class G, class Shared>
__device__ void store_tasks(const G &g, Shared &s, int rank, int wg) {
    constexpr int CHUNKS = Cfg::WG_COLS / Epilogue::COLUMN_RATIO / out_tile<typename G::Out>::cols;
    const bool leader = elect_one();
    if (Push::NOOP && !leader) return;
    ring_position<Cfg::OUT_STAGES> at;
    for_each_task<Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w) {
        if (has_rows<Cfg>(w, wg)) {
            if (leader) {
                stamp_arrival(stamp_kind::output_wait, s.outputs_arrived[wg][at.stage], at.phase, stamp_tile(w.task));
                store_tile<Cfg, Epilogue>(g, s, at, w.task, wg);
                stamp_lap(stamp_kind::store, stamp_tile(w.task));
            }
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) at.advance();
        }
        if constexpr (!Push::NOOP) {
            if (w.ghost()) return;
            if (leader) tma::store_async_wait<0>();  // the bytes are in memory, not only read
            __syncwarp();
            named_barrier_sync(BAR_STORERS, Cfg::CONSUMER_WGS * WARP_THREADS);
            if (wg == 0 && leader) Push::publish(g.push, w.task);
            if (leader) stamp_lap(stamp_kind::push, stamp_tile(w.task));
            __syncwarp();
        }
    });
    if (leader) tma::store_async_wait<0>();
}

// Roles: warps 0 .. CONSUMER_WARPS - 1 consume; then one warp loads (lane 0 gates, then TMA); then one per consumer
// warpgroup stores (lane 0) and pushes; the rest of the last warpgroup is idle.
template <class Cfg, class Gate, class Epilogue, class Push>
__global__ __launch_bounds__(Cfg::NUM_THREADS, 1) void grouped_gemm(
    const __grid_constant__ gemm_globals<Cfg, Gate, Epilogue, Push> g) {
    static_assert(Cfg::CONSUMER_WGS <= 3, "one loader and one storer per consumer warpgroup fit one warpgroup");
    extern __shared__ __align__(1024) uint8_t dynamic_shared[];  // the atom of the widest swizzle
    auto &s = *reinterpret_cast<gemm_shared<Cfg, typename Epilogue::out_type> *>(dynamic_shared);
    const int warp = warpid();
    const int rank = Cfg::CLUSTER == 1 ? 0 : cluster_ctarank();
    const int num_k_blocks = ceil_div(int(g.tokens.cols), Cfg::BLOCK_K);
    stamps_off();
    if (threadIdx.x == 0) {
        init_semaphores<Cfg>(s);
        tma::prefetch_descriptor(&g.tokens.tma_maps[0]);
        tma::prefetch_descriptor(&g.weights.tma_maps[0]);
        tma::prefetch_descriptor(&g.out.tma_maps[0]);
    }
    if constexpr (Cfg::CLUSTER > 1) cluster_sync();
    else __syncthreads();

    if (warp >= Cfg::CONSUMER_WARPS) {
        warpgroup::decrease_registers<Cfg::PRODUCER_REGISTERS>();
        const int role = warp - Cfg::CONSUMER_WARPS;
        if (role == 0) {
            if (elect_one()) load_tasks<Cfg, Gate>(g, s, rank, num_k_blocks);
        } else if (role <= Cfg::CONSUMER_WGS) {
            store_tasks<Cfg, Epilogue, Push>(g, s, rank, role - 1);
        }
    } else {
        warpgroup::increase_registers<Cfg::CONSUMER_REGISTERS>();
        consume_tasks<Cfg, Epilogue>(g, s, rank, num_k_blocks, warpgroup::groupid());
    }
    // No block leaves while its neighbour may still write to its shared memory or arrive on its semaphores.
    if constexpr (Cfg::CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace moe_tk
