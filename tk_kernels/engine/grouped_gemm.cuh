// Persistent grouped GEMM on SM90: out[slot, :] = epilogue(tokens[slot, :] * weights[expert(slot)]^T).
// docs/engine.md draws the pipeline and gives the arrive counts.
#pragma once

#include <limits>

#include "gemm_config.cuh"
#include "tile_task.cuh"

namespace moe_tk {

using namespace kittens;

enum named_barrier_id { BAR_STORERS = 1 };

template <class Cfg, class Tasks, class Gate, class Epilogue, class Push> struct gemm_globals {
    using T = typename Cfg::T;
    using a_slab = st<T, Cfg::A_SLAB, Cfg::BLOCK_K>;
    using b_slab = st<T, Cfg::B_SLAB, Cfg::BLOCK_K>;
    using out_tile = st_bf<Cfg::WG_ROWS, 64>;
    gl<T, 1, 1, -1, -1, a_slab> tokens;     // (slots, K)
    gl<T, 1, -1, -1, -1, b_slab> weights;   // (experts, N, K)
    gl<bf16, 1, 1, -1, -1, out_tile> out;   // (slots, N / COLUMN_RATIO)
    typename Tasks::params tasks;
    typename Gate::params gate;
    typename Epilogue::params epilogue;
    typename Push::params push;
    tma::cache_policy tokens_policy, weights_policy;
};

template <class Cfg> struct gemm_shared {
    struct stage {
        st<typename Cfg::T, Cfg::BLOCK_M, Cfg::BLOCK_K> a;
        st<typename Cfg::T, Cfg::BLOCK_N, Cfg::BLOCK_K> b;
    };
    stage inputs[Cfg::STAGES];
    st_bf<Cfg::WG_ROWS, 64> outputs[Cfg::CONSUMER_WGS][Cfg::OUT_STAGES];
    semaphore inputs_arrived[Cfg::STAGES], inputs_finished[Cfg::STAGES];
    semaphore outputs_arrived[Cfg::CONSUMER_WGS][Cfg::OUT_STAGES], outputs_finished[Cfg::CONSUMER_WGS][Cfg::OUT_STAGES];
};

// Dynamic shared memory of a launch: the struct, and room to align it to the 1024 bytes of a swizzle atom.
template <class Cfg> constexpr int shared_bytes() {
    constexpr int bytes = int(sizeof(gemm_shared<Cfg>)) + 1024;
    static_assert(bytes <= MAX_SHARED_MEMORY, "stages and outputs exceed shared memory: lower STAGES");
    return bytes;
}

template <class Cfg> __device__ __forceinline__ void init_semaphores(gemm_shared<Cfg> &s) {
    for (int i = 0; i < Cfg::STAGES; ++i) {
        init_semaphore(s.inputs_arrived[i], 1);  // the loader, with the bytes
        init_semaphore(s.inputs_finished[i], Cfg::CONSUMER_WARPS * Cfg::CLUSTER);
    }
    for (int w = 0; w < Cfg::CONSUMER_WGS; ++w)
        for (int i = 0; i < Cfg::OUT_STAGES; ++i) {
            init_semaphore(s.outputs_arrived[w][i], WARPGROUP_WARPS);
            init_semaphore(s.outputs_finished[w][i], 1);  // the storer
        }
    fence_semaphore_init();
}

// Whether consumer warpgroup `wg` has rows that are not padding, and something to store.
template <class Cfg> __device__ __forceinline__ bool has_rows(const cluster_work &w, int wg) {
    return !w.ghost && (wg / Cfg::WGS_N) * Cfg::WG_ROWS < w.task.rows;
}

// ---- loader: one thread -----------------------------------------------------------------------------------------
template <class Cfg, class G>
__device__ __forceinline__ void load_stage(const G &g, gemm_shared<Cfg> &s, int stage, const cluster_work &w, int rank,
                                           int k_block, int a_slabs) {
    using ST_A = typename G::a_slab;
    using ST_B = typename G::b_slab;
    constexpr uint16_t ALL = (1 << Cfg::CLUSTER) - 1;
    semaphore &sem = s.inputs_arrived[stage];
    auto &in = s.inputs[stage];
    tma::expect_bytes(sem, a_slabs * ST_A::num_bytes + 2 * ST_B::num_bytes);
    const int k = k_block * Cfg::BLOCK_K, row = w.task.row_block * Cfg::BLOCK_M, col = w.task.col_block * Cfg::BLOCK_N;
#pragma unroll
    for (int i = 0; i < Cfg::BLOCK_M / Cfg::A_SLAB; ++i) {
        if (i >= a_slabs) continue;
        const coord<> at(0, 0, row + i * Cfg::A_SLAB, k);
        ST_A &dst = in.a.template row_slab<Cfg::A_SLAB>(i);
        if (Cfg::CLUSTER == 1 || !w.share_a) tma::load_async(dst, g.tokens, at, sem, g.tokens_policy);
        else if (i % Cfg::CLUSTER == rank) tma::cluster::load_async(dst, g.tokens, at, sem, ALL, g.tokens_policy);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const coord<> at(0, w.task.expert, col + i * Cfg::B_SLAB, k);
        ST_B &dst = in.b.template row_slab<Cfg::B_SLAB>(i);
        if (Cfg::CLUSTER == 1 || !w.share_b) tma::load_async(dst, g.weights, at, sem, g.weights_policy);
        else if (i % Cfg::CLUSTER == rank) tma::cluster::load_async(dst, g.weights, at, sem, ALL, g.weights_policy);
    }
}

template <class Cfg, class Tasks, class Gate, class G>
__device__ void load_tasks(const G &g, gemm_shared<Cfg> &s, int rank, int num_k_blocks) {
    ring_position<Cfg::STAGES> at;
    for_each_task<Tasks, Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w) {
        Gate::wait(g.gate, w.task);
        const int a_slabs = ceil_div(w.task.rows, Cfg::A_SLAB);
        for (int k = 0; k < num_k_blocks; ++k, at.advance()) {
            wait(s.inputs_finished[at.stage], at.phase ^ 1);
            load_stage<Cfg>(g, s, at.stage, w, rank, k, a_slabs);
        }
    });
}

// ---- consumers: one warpgroup each --------------------------------------------------------------------------------
// Each consumer warp tells every block of the cluster that it has finished with a stage.
template <class Cfg> __device__ __forceinline__ void finish_inputs(gemm_shared<Cfg> &s, int stage) {
    const int lane = laneid();
    if constexpr (Cfg::CLUSTER == 1) {
        if (lane == 0) arrive(s.inputs_finished[stage]);
    } else if (lane < Cfg::CLUSTER) {
        tma::cluster::arrive(s.inputs_finished[stage], lane);
    }
}

template <class Cfg, int N>
__device__ __forceinline__ void multiply(gemm_shared<Cfg> &s, ring_position<Cfg::STAGES> &at, int num_k_blocks, int wg,
                                         rt_fl<16, N> &acc) {
    int previous = 0;
    warpgroup::mma_fence(acc);
    for (int k = 0; k < num_k_blocks; ++k) {
        wait(s.inputs_arrived[at.stage], at.phase);
        auto &in = s.inputs[at.stage];
        warpgroup::mma_fence();
        warpgroup::mma_ABt(acc, in.a.template row_slab<Cfg::WG_ROWS>(wg / Cfg::WGS_N),
                           in.b.template row_slab<Cfg::WG_COLS>(wg % Cfg::WGS_N), k > 0);
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

// A warpgroup without rows lets the stages pass.
template <class Cfg>
__device__ __forceinline__ void skip(gemm_shared<Cfg> &s, ring_position<Cfg::STAGES> &at, int num_k_blocks) {
    for (int k = 0; k < num_k_blocks; ++k, at.advance()) {
        wait(s.inputs_arrived[at.stage], at.phase);
        finish_inputs<Cfg>(s, at.stage);
    }
}

template <class Cfg, class Epilogue, int CHUNK = 0, int N>
__device__ __forceinline__ void emit_chunks(const typename Epilogue::params &p, gemm_shared<Cfg> &s,
                                            ring_position<Cfg::OUT_STAGES> &at, const tile_task &t, int wg,
                                            const rt_fl<16, N> &acc) {
    if constexpr (CHUNK < N / Epilogue::COLUMN_RATIO / 64) {
        const int row = t.row_block * Cfg::BLOCK_M + (wg / Cfg::WGS_N) * Cfg::WG_ROWS + warpgroup::warp_in_group() * 16;
        rt_bf<16, 64> out;
        Epilogue::template chunk<CHUNK>(p, t, row, acc, out);
        wait(s.outputs_finished[wg][at.stage], at.phase ^ 1);
        warpgroup::store(s.outputs[wg][at.stage], out);
        fence_proxy_async_shared();
        __syncwarp();
        if (laneid() == 0) arrive(s.outputs_arrived[wg][at.stage]);
        at.advance();
        emit_chunks<Cfg, Epilogue, CHUNK + 1>(p, s, at, t, wg, acc);
    }
}

template <class Cfg, class Tasks, class Epilogue, class G>
__device__ void consume_tasks(const G &g, gemm_shared<Cfg> &s, int rank, int num_k_blocks, int wg) {
    ring_position<Cfg::STAGES> in;
    ring_position<Cfg::OUT_STAGES> out;
    for_each_task<Tasks, Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w) {
        if (!has_rows<Cfg>(w, wg)) return skip<Cfg>(s, in, num_k_blocks);
        rt_fl<16, Cfg::WG_COLS> acc;
        multiply<Cfg>(s, in, num_k_blocks, wg, acc);
        emit_chunks<Cfg, Epilogue>(g.epilogue, s, out, w.task, wg, acc);
    });
}

// ---- storers: one warp for each consumer warpgroup, one elected lane of it works --------------------------------------
template <class Cfg, class Epilogue, class G>
__device__ __forceinline__ void store_tile(const G &g, gemm_shared<Cfg> &s,
                                           ring_position<Cfg::OUT_STAGES> at, const tile_task &t, int wg) {
    constexpr int COLS = Cfg::WG_COLS / Epilogue::COLUMN_RATIO, CHUNKS = COLS / 64;
    const int row = t.row_block * Cfg::BLOCK_M + (wg / Cfg::WGS_N) * Cfg::WG_ROWS;
    const int col = t.col_block * (Cfg::BLOCK_N / Epilogue::COLUMN_RATIO) + (wg % Cfg::WGS_N) * COLS;
    int previous = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        wait(s.outputs_arrived[wg][at.stage], at.phase);
        tma::store_async(g.out, s.outputs[wg][at.stage], coord<>(0, 0, row, col + c * 64));
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

template <class Cfg, class Tasks, class Epilogue, class Push, class G>
__device__ void store_tasks(const G &g, gemm_shared<Cfg> &s, int rank, int wg) {
    constexpr int CHUNKS = Cfg::WG_COLS / Epilogue::COLUMN_RATIO / 64;
    const bool leader = elect_one();
    if (Push::NOOP && !leader) return;
    ring_position<Cfg::OUT_STAGES> at;
    for_each_task<Tasks, Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w) {
        if (has_rows<Cfg>(w, wg)) {
            if (leader) store_tile<Cfg, Epilogue>(g, s, at, w.task, wg);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) at.advance();
        }
        if constexpr (!Push::NOOP) {
            if (w.ghost) return;
            if (leader) tma::store_async_wait<0>();  // the bytes are in memory, not only read
            __syncwarp();
            named_barrier_sync(BAR_STORERS, Cfg::CONSUMER_WGS * WARP_THREADS);
            if (wg == 0 && leader) Push::publish(g.push, w.task);
            __syncwarp();
        }
    });
    if (leader) tma::store_async_wait<0>();
}

// Roles: warps 0 .. CONSUMER_WARPS - 1 consume; then one warp loads (lane 0 gates, then TMA); then one per consumer
// warpgroup stores (lane 0) and pushes; the rest of the last warpgroup is idle.
template <class Cfg, class Tasks, class Gate, class Epilogue, class Push>
__global__ __launch_bounds__(Cfg::NUM_THREADS, 1) void grouped_gemm(
    const __grid_constant__ gemm_globals<Cfg, Tasks, Gate, Epilogue, Push> g) {
    static_assert(Cfg::CONSUMER_WGS <= 3, "one loader and one storer per consumer warpgroup fit one warpgroup");
    extern __shared__ uint8_t dynamic_shared[];
    shared_allocator allocator(dynamic_shared);
    auto &s = allocator.allocate<gemm_shared<Cfg>>();
    const int warp = warpid();
    const int rank = Cfg::CLUSTER == 1 ? 0 : cluster_ctarank();
    const int num_k_blocks = ceil_div(int(g.tokens.cols), Cfg::BLOCK_K);
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
            if (elect_one()) load_tasks<Cfg, Tasks, Gate>(g, s, rank, num_k_blocks);
        } else if (role <= Cfg::CONSUMER_WGS) {
            store_tasks<Cfg, Tasks, Epilogue, Push>(g, s, rank, role - 1);
        }
    } else {
        warpgroup::increase_registers<Cfg::CONSUMER_REGISTERS>();
        consume_tasks<Cfg, Tasks, Epilogue>(g, s, rank, num_k_blocks, warpgroup::groupid());
    }
    // No block leaves while its neighbour may still write to its shared memory or arrive on its semaphores.
    if constexpr (Cfg::CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace moe_tk
