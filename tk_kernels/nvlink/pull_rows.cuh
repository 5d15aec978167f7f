// Mover role: fills the gathered rows in the order in which GEMM 1 consumes them, from the tensor of this rank's tokens and from
// what the other ranks have sent. One thread of every block; bulk copies through a small ring in shared memory, so that it
// needs neither registers nor a multiprocessor of its own.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

using kittens::bf16;

struct pull_params {
    const bf16 *tokens;  // [num_tokens, H] of this rank
    bf16 *gathered;      // [slots, H]
    const int *counts, *slot_pair;
    uint32_t *arrived, *next_row;
    int row_block;
};

// A ring of pieces of rows. LOADS pieces are on their way in; the others are on their way out.
struct pull_shared {
    static constexpr int PIECES = 8, LOADS = 4, PIECE_BYTES = 2048;
    static constexpr int ROWS = PIECES + 2;  // a row is noted before the one PIECES earlier is announced
    alignas(128) uint8_t ring[PIECES][PIECE_BYTES];
    int slot_of[ROWS];  // by row number modulo ROWS
    kittens::semaphore full[PIECES];
};
__device__ __forceinline__ void init_pull(pull_shared &s) {
    for (int i = 0; i < pull_shared::PIECES; ++i) kittens::init_semaphore(s.full[i], 1);
}

class row_puller {
  public:
    __device__ row_puller(const call_view &c, const pull_params &p, pull_shared &s)
        : c_(c), p_(p), s_(s), row_bytes_(c.hidden * 2), per_row_((row_bytes_ + S::PIECE_BYTES - 1) / S::PIECE_BYTES) {}

    // Until the slots are used up, four at a time. What comes next is asked for two steps ahead.
    __device__ void run() {
        const int num_items = __ldg(p_.counts + COUNT_SLOTS) / SLOTS;
        int item = take(), next = take();
        int4 pairs = pairs_of(item, num_items);
        while (item < num_items) {
            const int4 next_pairs = pairs_of(next, num_items);
            const int after = take();
            const int pair[SLOTS] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
            for (int i = 0; i < SLOTS; ++i)
                if (pair[i] >= 0 && !move(pair[i] / c_.top_k, item * SLOTS + i)) return drain();
            item = next, next = after, pairs = next_pairs;
        }
        drain();
    }

  private:
    using S = pull_shared;
    static constexpr int SLOTS = 4;  // of one item: neighbours in one row block

    __device__ int take() { return int(fetch_add_relaxed_gpu(p_.next_row, 1u)); }
    __device__ int4 pairs_of(int item, int num_items) const {
        return item < num_items ? __ldg(reinterpret_cast<const int4 *>(p_.slot_pair) + item) : int4{-1, -1, -1, -1};
    }
    __device__ int bytes_of(int part) const { return min(S::PIECE_BYTES, row_bytes_ - part * S::PIECE_BYTES); }

    // Loads run LOADS pieces ahead of stores; a piece's place is free again, and its row announced, once its stores are
    // complete. False on abort.
    __device__ bool move(int row, int slot) {
        const bf16 *from = find(row);
        if (from == nullptr) return false;
        s_.slot_of[rows_ % S::ROWS] = slot;
        for (int part = 0; part < per_row_; ++part, ++loaded_) {
            if (loaded_ >= S::PIECES) {
                kittens::tma::store_async_wait<S::PIECES - S::LOADS - 1>();
                retire(loaded_ - S::PIECES);
            }
            load(loaded_, from, part);
            if (loaded_ >= S::LOADS) store(loaded_ - S::LOADS);
        }
        ++rows_;
        return true;
    }
    __device__ void drain() {
        for (int piece = max(0, loaded_ - S::LOADS); piece < loaded_; ++piece) store(piece);
        kittens::tma::store_async_wait<0>();
        for (int piece = max(0, loaded_ - S::PIECES); piece < loaded_; ++piece) retire(piece);
    }

    // Where the row lies; nullptr on abort. ORDER rows: acquires what export_rows of its owner releases, then orders the bulk
    // loads (asynchronous proxy) behind it.
    __device__ const bf16 *find(int row) {
        const int source = row / c_.max_tokens, token = row % c_.max_tokens;
        if (source == c_.rank) return p_.tokens + int64_t(token) * c_.hidden;
        if (!(ready_ >> source & 1)) {
            if (!spin_until(c_.rows_posted(c_.rank, source), *c_.epoch_ptr, c_, {phase_id::dispatch, role_id::place, token, source}))
                return nullptr;
            kittens::fence_proxy_async();
            ready_ |= 1u << source;
        }
        return c_.row<const bf16>(c_.rank, source, token);
    }
    __device__ void load(int piece, const bf16 *from, int part) {
        const int at = piece % S::PIECES;
        kittens::tma::expect_bytes(s_.full[at], bytes_of(part));
        kittens::tma::load_bulk_async(s_.ring[at], reinterpret_cast<const uint8_t *>(from) + part * S::PIECE_BYTES, bytes_of(part), s_.full[at]);
    }
    __device__ void store(int piece) {
        const int at = piece % S::PIECES, part = piece % per_row_;
        const int slot = s_.slot_of[piece / per_row_ % S::ROWS];
        kittens::wait(s_.full[at], piece / S::PIECES & 1);
        uint8_t *to = reinterpret_cast<uint8_t *>(p_.gathered + int64_t(slot) * c_.hidden) + part * S::PIECE_BYTES;
        kittens::tma::store_bulk_async(to, s_.ring[at], bytes_of(part));
        kittens::tma::store_commit_group();
    }
    // ORDER rows_ready: the stores of this row are complete; releases them to arrival_gate.
    __device__ void retire(int piece) {
        if (piece % per_row_ != per_row_ - 1) return;
        add_release_gpu(p_.arrived + s_.slot_of[piece / per_row_ % S::ROWS] / p_.row_block, 1u);
    }

    const call_view &c_;
    const pull_params &p_;
    pull_shared &s_;
    const int row_bytes_, per_row_;
    int rows_ = 0, loaded_ = 0;
    uint32_t ready_ = 0;
};

}  // namespace moe_tk::nvlink
