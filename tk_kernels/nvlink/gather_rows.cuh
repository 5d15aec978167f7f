// The loader of gather_gemm where rows lie where their owners keep or have sent them: one warp copies the row of each slot straight
// into the stages (cp.async), so that nobody has to bring an expert's rows together first. Weights go by TMA, as in load_tasks.
#pragma once

#include "../engine/load_tasks.cuh"
#include "hooks.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

// A configuration whose stages are filled by a warp: its lanes arrive with their copies, and the first of them with the weights.
template <class Base> struct gathering_config : Base {
    static constexpr int LOADERS = 1 + kittens::WARP_THREADS;
};

template <class T> struct gather_params {
    const T *tokens;       // [num_tokens, H] of this rank; e4m3: nullptr, own rows are sent like all others
    const int *slot_pair;  // [slots] pair (rank, token, choice) of each slot
};

// Where the rows of a tile lie: of the one under way and of the next one.
struct gather_shared_rows {
    const uint8_t *row[2][128];
};

// Row of a pair, in this rank's tensor or in what its owner has sent.
template <class T> __device__ __forceinline__ const uint8_t *row_of_pair(const call_view &c, const T *tokens, int pair) {
    const int row = pair / c.top_k, source = row / c.max_tokens, token = row % c.max_tokens;
    const T *at = sizeof(T) != 1 && source == c.rank ? tokens + int64_t(token) * c.hidden : c.row<const T>(c.rank, source, token);
    return reinterpret_cast<const uint8_t *>(at);
}

// ORDER rows: a lane for each rank acquires what its export_rows releases; __syncwarp hands that on to all lanes, which then copy.
// After a wait that was given up the kernel goes on with whatever rows there are.
__device__ __forceinline__ void wait_for_rows(const call_view &c) {
    const int from = kittens::laneid();
    if (from < c.world && (from != c.rank || c.keeps_own))
        spin_until(c.rows_posted(c.rank, from), *c.epoch_ptr, c, {phase_id::dispatch, role_id::place, from, from});
    __syncwarp();
}

template <class Cfg> class row_gatherer {
  public:
    using T = typename Cfg::T;

    __device__ row_gatherer(const call_view &c, const gather_params<T> &p, gather_shared_rows &rows)
        : c_(c), p_(p), rows_(rows), lane_(kittens::laneid()) {}

    template <class G, class Shared> __device__ void run(const G &g, Shared &s, int rank, int num_k_blocks) {
        ring_position<Cfg::STAGES> at;
        bool waited = false, noted = false;
        int buffer = 0;
        const int num_panels = Cfg::PANELS == 1 ? num_k_blocks : kittens::ceil_div(int(g.tokens.cols), Cfg::PANEL_K);
        const auto load_weights = [&](const cluster_work &w, int k) {
            kittens::wait(s.inputs_finished[at.stage], at.phase ^ 1);
            if (lane_ == 0) load_stage<Cfg, OPERAND_B>(g, s, at.stage, w, rank, k, num_panels, 0);
        };
        for_each_task_ahead<Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w, bool more, const cluster_work &next) {
            int k = 0;
            if (!waited) {  // the weights of the first stages are on their way meanwhile
                note(w.task, buffer);
                ring_position<Cfg::STAGES> first = at;
                for (; k < min(Cfg::STAGES, num_k_blocks); ++k, at.advance()) load_weights(w, k);
                stamp_lap_warp(stamp_kind::load_ahead, stamp_tile(w.task));
                wait_for_rows(c_);
                waited = true;
                stamp_lap_warp(stamp_kind::gate, stamp_tile(w.task));
                for (int i = 0; i < k; ++i, first.advance()) load_rows(s, first.stage, w.task.rows, i, buffer);
            }
            noted = false;
            for (; k < num_k_blocks; ++k, at.advance()) {
                load_weights(w, k);
                load_rows(s, at.stage, w.task.rows, k, buffer);
                if (k != num_k_blocks / 2 || !more) continue;
                note(next.task, buffer ^ 1);  // a read in front of a task's first load would be seen
                noted = true;
            }
            if (more && !noted) note(next.task, buffer ^ 1);
            buffer ^= 1;
            stamp_lap_warp(stamp_kind::load, stamp_tile(w.task));
        });
    }

  private:
    __device__ void note(const tile_task &t, int buffer) {
#pragma unroll
        for (int row = lane_; row < Cfg::BLOCK_M; row += kittens::WARP_THREADS)
            if (row < t.rows) rows_.row[buffer][row] = row_of_pair(c_, p_.tokens, __ldg(p_.slot_pair + t.row_block * Cfg::BLOCK_M + row));
        __syncwarp();
    }

    // Eight lanes copy a row's 128 bytes of a panel, in the places where TMA would put them. Columns past the last one are zeros: the
    // weights are too there, but zero times what another tile has left may not be zero. What padding rows hold reaches no other row.
    // ORDER stage_filled: the copies, then each lane's arrival, which comes when they are complete; consumers wait for all 33 arrivals
    // and order wgmma (asynchronous proxy) behind the copies (generic proxy).
    template <class Shared> __device__ void load_rows(Shared &s, int stage, int rows, int k_block, int buffer) {
        constexpr int ROW_BYTES = kittens::SWIZZLE_BYTES, GROUP = 8;  // rows of a swizzle pattern
        const int chunk = lane_ % GROUP, row = lane_ / GROUP;         // of the first four rows of a group; then the other four
        const int row_end = c_.hidden * int(sizeof(T));
#pragma unroll
        for (int p = 0; p < Cfg::PANELS; ++p) {
            const uint32_t panel = kittens::shared_address(s.inputs[stage].a[p].data);
            const uint32_t low = panel + row * ROW_BYTES + ((chunk ^ row) << 4), high = panel + (row + 4) * ROW_BYTES + ((chunk ^ (row + 4)) << 4);
            const int first = (k_block * Cfg::PANELS + p) * ROW_BYTES + chunk * 16;
            const bool inside = first < row_end;
#pragma unroll 2
            for (int group = 0; group * GROUP < rows; ++group) {
                const int at = group * GROUP + row;
                if (at < rows) copy_16(low + group * GROUP * ROW_BYTES, rows_.row[buffer][at] + first, inside);
                if (at + 4 < rows) copy_16(high + group * GROUP * ROW_BYTES, rows_.row[buffer][at + 4] + first, inside);
            }
        }
        if constexpr (Cfg::SCALED) {
            const uint32_t to = kittens::shared_address(s.token_scales[stage].data);
            for (int at = lane_; at < rows; at += kittens::WARP_THREADS) copy_4(to + at * 4, rows_.row[buffer][at] + c_.hidden + k_block * 4);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(kittens::shared_address(&s.inputs_arrived[stage])) : "memory");
    }
    // Nothing is read where not `real`: zeros are written.
    __device__ static void copy_16(uint32_t to, const uint8_t *from, bool real) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
    }
    __device__ static void copy_4(uint32_t to, const uint8_t *from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
    }

    const call_view &c_;
    const gather_params<T> &p_;
    gather_shared_rows &rows_;
    const int lane_;
};

// What gather_gemm is told when its loader gathers: no mover, no gate by row block.
struct sources_gate {
    struct params { call_view call; };
};
template <class Cfg> struct row_gather {
    using gate = sources_gate;
    using push = count_push;
    using params = gather_params<typename Cfg::T>;
    using shared = gather_shared_rows;
    static constexpr bool LOADS = true;
    __device__ static void init(shared &) {}
    template <class G, class Shared>
    __device__ static void load(const G &g, const params &p, shared &rows, Shared &s, int rank, int num_k_blocks) {
        row_gatherer<Cfg>(g.gate.call, p, rows).run(g, s, rank, num_k_blocks);
    }
    __device__ static void run(const call_view &, const params &, shared &) {}
    __device__ static void help(const call_view &, const params &) {}
};

}  // namespace moe_tk::nvlink
