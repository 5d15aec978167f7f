// The loaders of gather_gemm where rows lie where their owners keep or have sent them: two warps copy the row of each slot straight
// into the stages (cp.async), so that nobody has to bring an expert's rows together first. Weights go by TMA, as in load_tasks. All
// rows are there: open_call, which this launch has waited for, ends behind the last one.
#pragma once

#include "../engine/load_tasks.cuh"
#include "hooks.cuh"
#include "row_sources.cuh"

namespace moe_tk::nvlink {

constexpr int GATHER_WARPS = 2;  // one alone does not keep up with 128 rows a stage

// A configuration whose stages are filled by warps: their lanes arrive with their copies, and one more time with the weights.
template <class Base> struct gathering_config : Base {
    static constexpr int LOADERS = 1 + GATHER_WARPS * kittens::WARP_THREADS;
    static constexpr int SCALE_RUN = Base::SCALED ? 4 : 1;  // 16 bytes
};

template <class T> struct gather_params {
    const T *tokens;       // [num_tokens, H] of this rank; e4m3: nullptr, own rows are sent like all others
    const int *slot_pair;  // [slots] pair (rank, token, choice) of each slot
};

// Where a row lies: in bf16 its address. In e4m3, where all rows lie in this rank's segment, what is before it there, in units of 16
// bytes (so it may be 64 GiB): one instruction makes an address of it. `base` is the same for all rows.
template <class T> struct row_place {
    uint64_t address;
    __device__ __forceinline__ static row_place of(const uint8_t *row, const uint8_t *) { return {reinterpret_cast<uint64_t>(row)}; }
    __device__ __forceinline__ static uint64_t base(const uint8_t *, int bytes) { return bytes; }
    __device__ __forceinline__ const uint8_t *from(uint64_t base) const { return reinterpret_cast<const uint8_t *>(address + base); }
};
template <> struct row_place<kittens::fp8e4m3> {
    uint32_t units;
    __device__ __forceinline__ static row_place of(const uint8_t *row, const uint8_t *segment) { return {uint32_t((row - segment) >> 4)}; }
    __device__ __forceinline__ static uint64_t base(const uint8_t *segment, int bytes) {
        uint64_t base = reinterpret_cast<uint64_t>(segment) + bytes;
        asm("" : "+l"(base));  // computed once, not for each row
        return base;
    }
    __device__ __forceinline__ const uint8_t *from(uint64_t base) const { return reinterpret_cast<const uint8_t *>(base + uint64_t(units) * 16); }
};

// The rows of the tile under way and of the next one, by warp. A lane of the four (of eight) reads its rows of a batch at once.
template <class T> struct gather_shared_rows {
    static constexpr int MOST = 128;  // rows of a block
    alignas(16) row_place<T> row[GATHER_WARPS][2][4][MOST / GATHER_WARPS / 4];
};

// One of the warps. Rows are dealt out in batches of 16.
template <class Cfg> class row_gatherer {
  public:
    using T = typename Cfg::T;

    __device__ row_gatherer(const call_view &c, const gather_params<T> &p, gather_shared_rows<T> &rows, int part)
        : c_(c), p_(p), rows_(rows), segment_(reinterpret_cast<const uint8_t *>(c.base[c.rank])), part_(part), lane_(kittens::laneid()) {}

    template <class G, class Shared> __device__ void run(const G &g, Shared &s, int rank, int num_k_blocks) {
        ring_position<Cfg::STAGES> at;
        bool begun = false;
        int buffer = 0;
        const int num_panels = Cfg::PANELS == 1 ? num_k_blocks : kittens::ceil_div(int(g.tokens.cols), Cfg::PANEL_K);
        const auto begin_stage = [&](const cluster_work &w, int k) {
            kittens::wait(s.inputs_finished[at.stage], at.phase ^ 1);
            if (part_ == 0 && lane_ == 0) load_stage<Cfg, OPERAND_B>(g, s, at.stage, w, rank, k, num_panels, 0);
        };
        for_each_task_ahead<Cfg::CLUSTER>(g.tasks, Cfg::BLOCK_M, rank, [&](const cluster_work &w, bool more, const cluster_work &next) {
            int k = 0;
            if (!begun) {  // the weights of the first stages are on their way while this looks for the rows
                ring_position<Cfg::STAGES> first = at;
                for (; k < min(Cfg::STAGES, num_k_blocks); ++k, at.advance()) begin_stage(w, k);
                stamp_lap_warp(stamp_kind::load_ahead, stamp_tile(w.task));
                note(w.task, buffer);
                begun = true;
                for (int i = 0; i < k; ++i, first.advance()) load_rows(s, first.stage, w.task.rows, i, buffer);
            }
            const int middle = max(k, num_k_blocks / 2);
            for (; k < num_k_blocks; ++k, at.advance()) {
                begin_stage(w, k);
                load_rows(s, at.stage, w.task.rows, k, buffer);
                if (k == middle && more) note(next.task, buffer ^ 1);  // a read in front of a task's first load would be seen
            }
            if (middle == num_k_blocks && more) note(next.task, buffer ^ 1);
            buffer ^= 1;
            stamp_lap_warp(stamp_kind::load, stamp_tile(w.task));
        });
    }

  private:
    static constexpr int BATCH = 16, PART_ROWS = Cfg::BLOCK_M / GATHER_WARPS;
    static_assert(Cfg::BLOCK_M % (BATCH * GATHER_WARPS) == 0 && Cfg::BLOCK_M <= gather_shared_rows<T>::MOST);

    // Row of the block that is row i of this warp's.
    __device__ int row_of(int i) const { return (i / BATCH * GATHER_WARPS + part_) * BATCH + i % BATCH; }

    // Looks up where the rows of a tile lie. Padding repeats its first row: what it holds reaches no other row.
    __device__ void note(const tile_task &t, int buffer) {
        __syncwarp();  // the other lanes have read what this buffer held
#pragma unroll
        for (int i = lane_; i < PART_ROWS; i += kittens::WARP_THREADS) {
            const int row = row_of(i), pair = __ldg(p_.slot_pair + t.row_block * Cfg::BLOCK_M + (row < t.rows ? row : 0));
            rows_.row[part_][buffer][i % 4][i / 4] = row_place<T>::of(row_of_pair(c_, p_.tokens, pair), segment_);
        }
        __syncwarp();
    }

    // Eight lanes copy a row's 128 bytes of a panel, to the places where TMA would put them. Columns past the last one are zeros: the
    // weights are too there, but zero times what another tile has left may not be zero.
    // ORDER stage_filled: the copies, then each lane's arrival, which comes when they are complete; consumers wait for all arrivals
    // and order wgmma (asynchronous proxy) behind the copies (generic proxy).
    template <class Shared> __device__ void load_rows(Shared &s, int stage, int rows, int k_block, int buffer) {
        constexpr int ROW_BYTES = kittens::SWIZZLE_BYTES, COPIES = BATCH / 4;  // of a lane for a batch; the pattern repeats every 8 rows
        const int chunk = lane_ % 8, row = lane_ / 8;
#pragma unroll
        for (int p = 0; p < Cfg::PANELS; ++p) {
            const uint32_t panel = kittens::shared_address(s.inputs[stage].a[p].data) + part_ * BATCH * ROW_BYTES;
            const uint32_t places[2] = {panel + row * ROW_BYTES + ((chunk ^ row) << 4), panel + (row + 4) * ROW_BYTES + ((chunk ^ (row + 4)) << 4)};
            const int first = (k_block * Cfg::PANELS + p) * ROW_BYTES + chunk * 16;
            const uint64_t base = row_place<T>::base(segment_, first);
            const bool inside = Cfg::SCALED || first < c_.hidden * int(sizeof(T));
#pragma unroll
            for (int batch = 0; batch < PART_ROWS / BATCH; ++batch) {
                if (row_of(batch * BATCH) >= rows) break;
                alignas(16) row_place<T> places_of[COPIES];
#pragma unroll
                for (int i = 0; i < int(sizeof(places_of) / 16); ++i)
                    reinterpret_cast<uint4 *>(places_of)[i] = reinterpret_cast<const uint4 *>(&rows_.row[part_][buffer][row][batch * COPIES])[i];
#pragma unroll
                for (int i = 0; i < COPIES; ++i)
                    copy_16(places[i % 2] + (batch * GATHER_WARPS * BATCH + i / 2 * 8) * ROW_BYTES, places_of[i].from(base), inside);
            }
        }
        if (Cfg::SCALED && run_.begins(k_block)) {
            const uint32_t to = kittens::shared_address(s.token_scales[run_.place].data);
            run_.advance();
            const uint64_t base = row_place<T>::base(segment_, c_.hidden + k_block * 4);
#pragma unroll
            for (int i = lane_; i < PART_ROWS; i += kittens::WARP_THREADS)
                if (row_of(i) < rows) copy_16(to + row_of(i) * 16, rows_.row[part_][buffer][i % 4][i / 4].from(base), true);
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(kittens::shared_address(&s.inputs_arrived[stage])) : "memory");
    }
    // Nothing is read where not `real`: zeros are written. No clobber of memory, so that addresses are computed meanwhile; the arrival
    // behind them has it.
    __device__ static void copy_16(uint32_t to, const uint8_t *from, bool real) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0));
    }

    const call_view &c_;
    const gather_params<T> &p_;
    gather_shared_rows<T> &rows_;
    const uint8_t *const segment_;
    const int part_, lane_;
    scale_place<Cfg> run_;
};

// There is none: rows are there before the launch that reads them.
struct sources_gate {
    static constexpr bool NOOP = true;
    struct params { call_view call; };
};
// The source of gather_gemm in the layer and in dispatch_gemm.
template <class Cfg> struct row_gather {
    using gate = sources_gate;
    using push = count_push;
    using params = gather_params<typename Cfg::T>;
    using shared = gather_shared_rows<typename Cfg::T>;
    static constexpr bool LOADS = true;
    __device__ static void init(shared &) {}
    template <class G, class Shared>
    __device__ static void load(const G &g, const params &p, shared &rows, Shared &s, int rank, int num_k_blocks, int part) {
        row_gatherer<Cfg>(g.gate.call, p, rows, part).run(g, s, rank, num_k_blocks);
    }
};

}  // namespace moe_tk::nvlink
