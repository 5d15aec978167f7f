// Mover role: fills the gathered rows in the order in which GEMM 1 consumes them, from the tensor of this rank's tokens and from
// what the other ranks have sent. One thread of every block; bulk copies through a small ring in shared memory, so that it
// needs neither registers nor a multiprocessor of its own. For e4m3 one warp: the first lane does the same, and all of them
// spread the rows' scales.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

using kittens::bf16;

template <class T> struct pull_params {
    const T *tokens;  // bf16: [num_tokens, H] of this rank
    T *gathered;      // [slots, H]
    float *scales;    // e4m3: [H / 128, scales_stride] of the gathered rows
    int64_t scales_stride;
    const int *counts, *slot_pair;
    uint32_t *arrived, *next_row;
    int row_block;
};

// A ring of pieces of rows. LOADS pieces are on their way in; the others are on their way out. The GEMM's own scales leave
// e4m3 less room.
template <class T> struct pull_shared {
    static constexpr bool SCALED = sizeof(T) == 1;
    static constexpr int PIECES = SCALED ? 7 : 8, LOADS = 4, PIECE_BYTES = 2048;
    static constexpr int ROWS = PIECES + 2;  // a row is noted before the one PIECES earlier is announced
    alignas(128) uint8_t ring[PIECES][PIECE_BYTES];
    int slot_of[ROWS];  // by row number modulo ROWS
    kittens::semaphore full[PIECES];
};
template <class T> __device__ __forceinline__ void init_pull(pull_shared<T> &s) {
    for (int i = 0; i < s.PIECES; ++i) kittens::init_semaphore(s.full[i], 1);
}

// The scales of four neighbouring slots on their way from four rows, where they lie together, to the columns that GEMM 1 reads:
// scale i of a row goes to (i, slot). A lane takes every 32nd scale, of all four slots at a time.
class scale_spreader {
  public:
    static constexpr int BATCH = 2;  // scales of a lane that are fetched ahead; enough for H = 8192
    __device__ scale_spreader(const float *const (&rows)[4], float *to, int64_t stride, int scales)
        : rows_(rows), to_(to), stride_(stride), scales_(scales) {}
    __device__ void fetch() { fetch(0); }
    // ORDER scales_ready: plain stores of all lanes, then the warp's barrier; the first lane releases them together with the
    // rows (retire), and the fence of arrival_gate lets bulk loads see them.
    __device__ void store() {
        for (int base = 0; base < scales_; base += 32 * BATCH) {
            if (base > 0) fetch(base);
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const int i = base + 32 * u + kittens::laneid();
                if (i < scales_) *reinterpret_cast<float4 *>(to_ + i * stride_) = {value_[u][0], value_[u][1], value_[u][2], value_[u][3]};
            }
        }
        __syncwarp();
    }

  private:
    __device__ void fetch(int base) {
#pragma unroll
        for (int u = 0; u < BATCH; ++u)
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int i = base + 32 * u + kittens::laneid();
                value_[u][s] = i < scales_ && rows_[s] ? __ldcg(rows_[s] + i) : 0.0f;  // padding: anything but NaN
            }
    }
    const float *const (&rows_)[4];
    float *const to_;
    const int64_t stride_;
    const int scales_;
    float value_[BATCH][4];
};

template <class T> class row_puller {
  public:
    __device__ row_puller(const call_view &c, const pull_params<T> &p, pull_shared<T> &s)
        : c_(c), p_(p), s_(s), row_bytes_(c.hidden * int(sizeof(T))), per_row_((row_bytes_ + S::PIECE_BYTES - 1) / S::PIECE_BYTES) {}

    // Until the slots are used up, four at a time. What comes next is asked for two steps ahead.
    __device__ void run() {
        const int num_items = __ldg(p_.counts + COUNT_SLOTS) / SLOTS;
        int item = told(ask()), next = told(ask());
        int4 pairs = pairs_of(item, num_items);
        while (item < num_items) {
            const int4 next_pairs = pairs_of(next, num_items);
            const int after = ask();
            const int pair[SLOTS] = {pairs.x, pairs.y, pairs.z, pairs.w};
            const T *from[SLOTS];
#pragma unroll
            for (int i = 0; i < SLOTS; ++i)
                if (!find(pair[i], from[i])) return drain();
            if (from[0] != nullptr) move_item(from, item * SLOTS);  // padding ends a group, so else there is nothing
            item = next, next = told(after), pairs = next_pairs;
        }
        drain();
    }

  private:
    using S = pull_shared<T>;
    static constexpr int SLOTS = 4;  // of one item: neighbours in one row block

    // Whether this thread copies rows: the only one for bf16.
    __device__ static bool leads() { return !S::SCALED || kittens::laneid() == 0; }
    __device__ int ask() { return leads() ? int(fetch_add_relaxed_gpu(p_.next_row, 1u)) : 0; }
    __device__ static int told(int leaders) {
        if constexpr (S::SCALED) return __shfl_sync(0xffffffff, leaders, 0);
        else return leaders;
    }
    __device__ int4 pairs_of(int item, int num_items) const {
        return item < num_items ? __ldg(reinterpret_cast<const int4 *>(p_.slot_pair) + item) : int4{-1, -1, -1, -1};
    }
    __device__ int bytes_of(int part) const { return min(S::PIECE_BYTES, row_bytes_ - part * S::PIECE_BYTES); }

    __device__ void move_item(const T *const (&from)[SLOTS], int slot) {
        if constexpr (S::SCALED) {
            const float *rows[SLOTS];
#pragma unroll
            for (int i = 0; i < SLOTS; ++i) rows[i] = from[i] ? reinterpret_cast<const float *>(from[i] + c_.hidden) : nullptr;
            scale_spreader spreader(rows, p_.scales + slot, p_.scales_stride, c_.hidden / 128);
            spreader.fetch();
            if (leads()) move(from[0], slot);
            spreader.store();  // before any of these rows can be announced: that takes PIECES further pieces
        } else {
            move(from[0], slot);
        }
#pragma unroll
        for (int i = 1; i < SLOTS; ++i)
            if (from[i] != nullptr && leads()) move(from[i], slot + i);
    }
    // Loads run LOADS pieces ahead of stores; a piece's place is free again, and its row announced, once its stores are complete.
    __device__ void move(const T *from, int slot) {
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
    }
    __device__ void drain() {
        if (!leads()) return;
        for (int piece = max(0, loaded_ - S::LOADS); piece < loaded_; ++piece) store(piece);
        kittens::tma::store_async_wait<0>();
        for (int piece = max(0, loaded_ - S::PIECES); piece < loaded_; ++piece) retire(piece);
    }

    // Where the row of a pair lies; nullptr for padding. False on abort. ORDER rows: acquires what export_rows of its owner
    // releases, then orders the bulk loads (asynchronous proxy) behind it.
    __device__ bool find(int pair, const T *&from) {
        from = nullptr;
        if (pair < 0) return true;
        const int row = pair / c_.top_k, source = row / c_.max_tokens, token = row % c_.max_tokens;
        if (!S::SCALED && source == c_.rank) {
            from = p_.tokens + int64_t(token) * c_.hidden;
            return true;
        }
        if (!(ready_ >> source & 1)) {
            bool ok = true;
            if (leads()) {
                ok = spin_until(c_.rows_posted(c_.rank, source), *c_.epoch_ptr, c_, {phase_id::dispatch, role_id::place, token, source});
                kittens::fence_proxy_async();
            }
            if (!told(ok)) return false;
            ready_ |= 1u << source;
        }
        from = c_.row<const T>(c_.rank, source, token);
        return true;
    }
    __device__ void load(int piece, const T *from, int part) {
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
    const pull_params<T> &p_;
    pull_shared<T> &s_;
    const int row_bytes_, per_row_;
    int rows_ = 0, loaded_ = 0;
    uint32_t ready_ = 0;
};

}  // namespace moe_tk::nvlink
