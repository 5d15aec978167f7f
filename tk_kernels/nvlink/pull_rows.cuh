// Mover role: reads each wanted token once, from this rank's tokens or from what the other ranks have sent, in delivery order,
// and writes it to all its slots. One warp of every block; bulk copies through a small ring in shared memory, so that it needs
// neither registers nor a multiprocessor of its own. (Filling slot by slot instead, one copy in for each copy out, was slower:
// bulk copies queue behind the GEMM's own loads, so their number counts.) An e4m3 row travels with its scales, which are then
// spread over the scales of all slots as the GEMM reads them.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

using kittens::bf16;

template <class T> struct pull_params {
    const T *tokens;  // [num_tokens, H] of this rank; e4m3: nullptr, own rows are sent like all others
    T *gathered;      // [slots, H]
    float *scales;    // e4m3: [H / 128, scales_stride] of the gathered rows
    int64_t scales_stride;
    const int *counts, *delivery_order, *slots;
    uint32_t *arrived, *next_row;
    int row_block, col_blocks;  // of GEMM 1
    bool consumers_place;       // consumers place the first rows (place_first_rows)
    unsigned mover_blocks;      // blocks whose mover moves rows, at least 1: rows are dispensed, so any number moves them all
};

// A ring of pieces of rows. LOADS pieces are on their way in; the others are on their way out. A piece of e4m3 holds 2048
// columns with their scales, and the ring leaves room for the scales that the GEMM keeps in shared memory.
template <class T> struct pull_shared {
    static constexpr bool SCALED = sizeof(T) == 1;
    static constexpr int PIECES = SCALED ? 7 : 8, LOADS = SCALED ? 4 : 5, PIECE_BYTES = SCALED ? 2112 : 2048;
    static constexpr int ROWS = PIECES + 2;  // a row is noted before the one PIECES earlier is announced
    alignas(64) uint8_t ring[PIECES][PIECE_BYTES];
    int slot_of[ROWS][32];  // by row number modulo ROWS: slot of choice `lane`, or -1
    kittens::semaphore full[PIECES];
};
template <class T> __device__ __forceinline__ void init_pull(pull_shared<T> &s) {
    for (int i = 0; i < s.PIECES; ++i) kittens::init_semaphore(s.full[i], 1);
}

__device__ __forceinline__ int take_item(uint32_t *dispenser) {
    int item = 0;
    if (kittens::laneid() == 0) item = int(fetch_add_relaxed_gpu(dispenser, 1u));
    return __shfl_sync(0xffffffff, item, 0);
}

// Where rows lie, for one warp: in this rank's tensor (bf16), or in what their owners have sent.
template <class T> class row_sources {
  public:
    __device__ row_sources(const call_view &c, const T *tokens) : c_(c), tokens_(tokens) {}

    // nullptr on abort. ORDER rows: acquires what export_rows of the owner releases, then orders bulk loads (asynchronous
    // proxy) behind it.
    __device__ const T *find(int row) {
        const int source = row / c_.max_tokens, token = row % c_.max_tokens;
        if (sizeof(T) != 1 && source == c_.rank) return tokens_ + int64_t(token) * c_.hidden;
        if (!(ready_ >> source & 1)) {
            bool ok = true;
            if (kittens::laneid() == 0) {
                ok = spin_until(c_.rows_posted(c_.rank, source), *c_.epoch_ptr, c_, {phase_id::dispatch, role_id::place, token, source});
                kittens::fence_proxy_async();
            }
            __syncwarp();  // what lane 0 has acquired holds for all lanes
            if (!__shfl_sync(0xffffffff, int(ok), 0)) return nullptr;
            ready_ |= 1u << source;
        }
        return c_.row<const T>(c_.rank, source, token);
    }

  private:
    const call_view &c_;
    const T *tokens_;
    uint32_t ready_ = 0;
};

template <class T> class row_puller {
  public:
    __device__ row_puller(const call_view &c, const pull_params<T> &p, pull_shared<T> &s)
        : c_(c), p_(p), s_(s), sources_(c, p.tokens), lane_(kittens::laneid()),
          row_bytes_(S::SCALED ? (scales_at() + c.hidden / 32 + 15) / 16 * 16 : scales_at()),
          per_row_((row_bytes_ + S::PIECE_BYTES - 1) / S::PIECE_BYTES) {}

    // Until the list of rows is used up. Loads run LOADS pieces ahead of stores; a piece's place is free again, and its
    // row announced, once its stores are complete.
    __device__ void run() {
        const int num_rows = __ldg(p_.counts + COUNT_JOBS);
        int number = 0, loaded = 0, next = take_item(p_.next_row);
        for (; next < num_rows; ++number) {
            const int row = __ldg(p_.delivery_order + next);
            next = take_item(p_.next_row);
            const T *from = sources_.find(row);
            if (from == nullptr) break;
            s_.slot_of[number % S::ROWS][lane_] = lane_ < c_.top_k ? __ldg(p_.slots + int64_t(row) * c_.top_k + lane_) : -1;
            for (int part = 0; part < per_row_; ++part, ++loaded) {
                if (loaded >= S::PIECES) {
                    kittens::tma::store_async_wait<S::PIECES - S::LOADS - 1>();
                    retire(loaded - S::PIECES);
                    __syncwarp();
                }
                if (lane_ == 0) load(loaded, from, part);
                if (loaded >= S::LOADS) store(loaded - S::LOADS);
            }
        }
        for (int piece = max(0, loaded - S::LOADS); piece < loaded; ++piece) store(piece);
        kittens::tma::store_async_wait<0>();
        for (int piece = max(0, loaded - S::PIECES); piece < loaded; ++piece) retire(piece);
    }

  private:
    using S = pull_shared<T>;

    __device__ int scales_at() const { return c_.hidden * int(sizeof(T)); }  // bytes of a row before its scales
    __device__ int bytes_of(int part) const { return min(S::PIECE_BYTES, row_bytes_ - part * S::PIECE_BYTES); }

    __device__ void load(int piece, const T *from, int part) {
        const int at = piece % S::PIECES;
        kittens::tma::expect_bytes(s_.full[at], bytes_of(part));
        kittens::tma::load_bulk_async(s_.ring[at], reinterpret_cast<const uint8_t *>(from) + part * S::PIECE_BYTES, bytes_of(part), s_.full[at]);
    }
    // Each lane writes the piece to the slot of its choice, as one bulk group; groups of other lanes are empty.
    __device__ void store(int piece) {
        const int at = piece % S::PIECES, first = piece % per_row_ * S::PIECE_BYTES;
        const int slot = s_.slot_of[piece / per_row_ % S::ROWS][lane_];
        const int bytes = min(S::PIECE_BYTES, scales_at() - first);  // without scales
        kittens::wait(s_.full[at], piece / S::PIECES & 1);
        if (slot >= 0 && bytes > 0) {
            uint8_t *to = reinterpret_cast<uint8_t *>(p_.gathered + int64_t(slot) * c_.hidden) + first;
            kittens::tma::store_bulk_async(to, s_.ring[at], bytes);
        }
        kittens::tma::store_commit_group();
        if constexpr (S::SCALED)
            if (first + S::PIECE_BYTES > scales_at()) spread_scales(s_.ring[at], first, slot);
    }
    // The scales in the piece that starts at byte `first` of its row: scale i goes to (i, slot) for the slot of every choice.
    // ORDER scales_ready: plain stores of all lanes; retire makes them visible to bulk loads (asynchronous proxy) and releases
    // them together with the row, and arrival_gate acquires.
    __device__ void spread_scales(const uint8_t *piece, int first, int slot) {
        const int begin = max(0, first - scales_at()) / 4, end = min(c_.hidden / 128, (first + S::PIECE_BYTES - scales_at()) / 4);
        const float *scales = reinterpret_cast<const float *>(piece + max(0, scales_at() - first)) - begin;
        const uint32_t chosen = __ballot_sync(0xffffffff, slot >= 0);
        for (int base = begin; base < end; base += 32) {
            const int i = base + lane_;
            const float scale = i < end ? scales[i] : 0.0f;
            for (uint32_t left = chosen; left != 0; left &= left - 1) {
                const int to = __shfl_sync(0xffffffff, slot, __ffs(left) - 1);
                if (i < end) p_.scales[i * p_.scales_stride + to] = scale;
            }
        }
    }
    // ORDER rows_ready: the lane's stores of this row are complete; releases them to arrival_gate::wait.
    __device__ void retire(int piece) {
        if (piece % per_row_ != per_row_ - 1) return;
        if constexpr (S::SCALED) {
            kittens::fence_proxy_async();  // not sooner: by now the scales' stores have ended
            __syncwarp();
        }
        const int slot = s_.slot_of[piece / per_row_ % S::ROWS][lane_];
        if (slot >= 0) add_release_gpu(p_.arrived + slot / p_.row_block, 1u);
    }

    const call_view &c_;
    const pull_params<T> &p_;
    pull_shared<T> &s_;
    row_sources<T> sources_;
    const int lane_, row_bytes_, per_row_;  // row_bytes_: that are loaded, in pieces
};

}  // namespace moe_tk::nvlink
