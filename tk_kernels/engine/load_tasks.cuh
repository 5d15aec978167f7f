// The loader role of a grouped GEMM, one thread: gates, then TMA loads of both operands of every task.
#pragma once

#include "../platform/stamps.cuh"
#include "gemm_memory.cuh"

namespace moe_tk {

// One slab of a stage: by every block for itself, or by one of them for all.
template <class Cfg, class ST, class GL>
__device__ __forceinline__ void load_slab(ST &dst, const GL &src, const coord<> &at, semaphore &sem, bool shared, bool mine,
                                          tma::cache_policy policy) {
    constexpr uint16_t ALL = (1 << Cfg::CLUSTER) - 1;
    if (Cfg::CLUSTER == 1 || !shared) tma::load_async(dst, src, at, sem, policy);
    else if (mine) tma::cluster::load_async(dst, src, at, sem, ALL, policy);
}

// What one stage brings in: both operands, or one of them.
enum operand_bits { OPERAND_A = 1, OPERAND_B = 2, OPERANDS_AB = 3 };

// The bytes of both operands are announced with B, so B alone may go first.
template <class Cfg, int WHICH, class G, class Shared>
__device__ __forceinline__ void load_stage(const G &g, Shared &s, int stage, const cluster_work &w, int rank, int k_block,
                                           int num_panels, int a_slabs) {
    using ST_A = typename G::a_slab;
    using ST_B = typename G::b_slab;
    semaphore &sem = s.inputs_arrived[stage];
    auto &in = s.inputs[stage];
    const uint32_t scale_bytes = Cfg::SCALED ? a_slabs * Cfg::A_SLAB * sizeof(float) : 0;
    if constexpr (WHICH & OPERAND_B)
        tma::expect_bytes(sem, Cfg::PANELS * (a_slabs * ST_A::num_bytes + 2 * ST_B::num_bytes) + scale_bytes);
#pragma unroll
    for (int p = 0; p < Cfg::PANELS; ++p) {
        const int k = k_block * Cfg::BLOCK_K + p * Cfg::PANEL_K;
        if constexpr (WHICH & OPERAND_A)
#pragma unroll
            for (int i = 0; i < Cfg::BLOCK_M / Cfg::A_SLAB; ++i)
                if (i < a_slabs)
                    load_slab<Cfg>(in.a[p].template row_slab<Cfg::A_SLAB>(i), g.tokens_of(w.task),
                                   g.tokens_at(w.task, i * Cfg::A_SLAB, k), sem, w.share_a(), i % Cfg::CLUSTER == rank,
                                   g.tokens_policy);
        if constexpr (WHICH & OPERAND_B)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                load_slab<Cfg>(in.b[p].template row_slab<Cfg::B_SLAB>(i), g.weights,
                               g.weights_at(w.task, i, k_block * Cfg::PANELS + p, num_panels), sem, w.share_b(),
                               i % Cfg::CLUSTER == rank, g.weights_policy);
    }
    if constexpr (Cfg::SCALED && (WHICH & OPERAND_A))
        if (scale_bytes > 0) tma::load_bulk_async(s.token_scales[stage].data, g.token_scales_of(w.task, k_block), scale_bytes, sem);
}

// A gate that is not open yet costs nothing but the rows: the weights of the first stages are on their way meanwhile. And
// it is asked in the middle of the task before, since an acquire in front of a task's first load would be seen.
template <class Cfg, class Gate, class G, class Shared>
__device__ void load_tasks(const G &g, Shared &s, int rank, int num_k_blocks) {
    ring_position<Cfg::STAGES> at;
    [[maybe_unused]] bool open = false;
    const int num_panels = Cfg::PANELS == 1 ? num_k_blocks : ceil_div(int(g.tokens.cols), Cfg::PANEL_K);
    for_each_task_ahead<Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w, bool more, const cluster_work &next) {
        const int a_slabs = ceil_div(w.task.rows, Cfg::A_SLAB);
        int k = 0;
        if constexpr (!Gate::NOOP) {
            if (!open) {
                ring_position<Cfg::STAGES> first = at;
                if (!Gate::ready(g.gate, w.task)) {
                    for (; k < min(Cfg::STAGES, num_k_blocks); ++k, at.advance()) {
                        wait(s.inputs_finished[at.stage], at.phase ^ 1);
                        load_stage<Cfg, OPERAND_B>(g, s, at.stage, w, rank, k, num_panels, a_slabs);
                    }
                    stamp_lap(stamp_kind::load_ahead, stamp_tile(w.task));
                    Gate::wait(g.gate, w.task);
                }
                stamp_lap(stamp_kind::gate, stamp_tile(w.task));
                for (int i = 0; i < k; ++i, first.advance()) load_stage<Cfg, OPERAND_A>(g, s, first.stage, w, rank, i, num_panels, a_slabs);
            }
            open = false;
        }
        for (; k < num_k_blocks; ++k, at.advance()) {
            wait(s.inputs_finished[at.stage], at.phase ^ 1);
            load_stage<Cfg, OPERANDS_AB>(g, s, at.stage, w, rank, k, num_panels, a_slabs);
            if constexpr (!Gate::NOOP)
                if (k == num_k_blocks / 2 && more) open = Gate::ready(g.gate, next.task);
        }
        stamp_lap(stamp_kind::load, stamp_tile(w.task));
    });
}

}  // namespace moe_tk
