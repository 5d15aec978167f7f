// What every launch of a call shares: the symmetric heap of all ranks, the clock's limit, and where failures are reported.
#pragma once

#include <cstdint>

#include "../platform/stamps.cuh"
#include "../protocol/control.hpp"
#include "column_work.hpp"

namespace moe_tk::nvlink {

using protocol::MAX_RANKS;

constexpr int MAX_WORLD = 32;  // a lane per rank
constexpr int FLAG_LINE = 32;  // u32 between the flags of two writers

// What a rank says about its call, next to its routing. Two copies, by the parity of the epoch: a rank that is one call
// ahead writes the other one, and nobody can be two ahead.
struct call_header {
    uint64_t signature;   // equal on all ranks
    int32_t num_tokens;
    int32_t refused;      // 1: that rank raises, nothing is computed
};
static_assert(sizeof(call_header) == 16);

// Pinned host memory: how the device and the host of one rank tell each other of failures without any API call.
struct mailbox {
    uint32_t failed;       // abort_kind, by the device: a wait was given up
    uint32_t void_reason;  // void_reason, by the device: the call was not computed
    uint32_t void_rank;    // the rank that caused it
    uint32_t void_value;   // its number of tokens
    uint64_t lost_ranks;   // by the host: bit p, the process of rank p is gone
    uint32_t host_abort;   // by the host: stop waiting
    uint32_t padding;
};
static_assert(sizeof(mailbox) == 32, "moe_tk.memory.nvlink reads the same");
enum class void_reason : uint32_t { none, refused, disagree, capacity };

struct heap_offsets {  // bytes; the same in every rank's segment
    int64_t control;       // control_block
    int64_t headers;       // [2, R] call_header                       [., p] written by rank p
    int64_t posted;        // [R, FLAG_LINE] epoch of header p
    int64_t rows_posted;   // [R, FLAG_LINE] epoch of the rows from rank p
    int64_t routing;       // [2, R, max_tokens, k] (i32 id, f32 weight)  [., p] written by rank p
    int64_t rows;          // [R - 1 or, e4m3, R, max_tokens, row_bytes] tokens that have work here, written by their owners
    int64_t combined;      // [R, job_chunks, MAX_COL_GROUPS] epoch    [p] written by rank p
    int64_t planes;        // [R, max_tokens, H] partial rows          [p] written by rank p
};

struct call_view {
    char *base[MAX_RANKS];  // every rank's segment as mapped here
    heap_offsets at;
    mailbox *host;
    uint32_t *record_claim;    // local: the first wait that gives up files the record
    const uint32_t *epoch_ptr; // local: number of the last finished or current call
    uint64_t timeout_ns;
    int world, rank, max_tokens, top_k, hidden, job_chunk, job_chunks;
    int row_bytes;             // between sent rows: H bf16, or H e4m3 with their H / 128 scales behind them
    int keeps_own;             // rows are sent to their own rank too (e4m3)
#ifdef MOE_TK_TRACE
    stamp_buffer stamps;
#endif

    template <class T> __device__ T *region(int owner, int64_t offset) const { return reinterpret_cast<T *>(base[owner] + offset); }
    __device__ protocol::control_block *control(int owner) const { return region<protocol::control_block>(owner, at.control); }
    __device__ call_header *header(int owner, uint32_t parity, int from) const {
        return region<call_header>(owner, at.headers) + parity * world + from;
    }
    __device__ uint32_t *posted(int owner, int from) const { return region<uint32_t>(owner, at.posted) + from * FLAG_LINE; }
    __device__ uint32_t *rows_posted(int owner, int from) const { return region<uint32_t>(owner, at.rows_posted) + from * FLAG_LINE; }
    __device__ int2 *routing(int owner, uint32_t parity, int from) const {
        return region<int2>(owner, at.routing) + (int64_t(parity) * world + from) * max_tokens * top_k;
    }
    __device__ uint32_t *combined(int owner, int from, int chunk, int group) const {
        return region<uint32_t>(owner, at.combined) + (from * job_chunks + chunk) * MAX_COL_GROUPS + group;
    }
    template <class T> __device__ T *row(int owner, int from, int token) const {
        const int sender = from - (from > owner && !keeps_own);
        return region<T>(owner, at.rows + (int64_t(sender) * max_tokens + token) * row_bytes);
    }
    template <class T> __device__ T *plane(int owner, int from, int token) const {
        return region<T>(owner, at.planes) + (int64_t(from) * max_tokens + token) * hidden;
    }
};

}  // namespace moe_tk::nvlink
