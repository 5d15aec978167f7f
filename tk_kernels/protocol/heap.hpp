// The symmetric heap as kernels see it: one segment per rank, mapped by all, the same regions at the same offsets.
// Sizes follow from the geometry of the workspace alone, never from a call, so that addresses keep their meaning.
#pragma once

#include <cstdint>

#include "../platform/platform.hpp"
#include "control.hpp"

namespace moe_tk::protocol {

// What a rank says about its call before anything is moved. Written by that rank only, into every rank's heap.
struct call_header {
    int64_t num_tokens;
    uint64_t signature;   // hash of op, layer and shapes: must be equal on all ranks
    uint32_t op;          // op_id
    uint32_t layer;       // ordinal of the layer on its workspace
    uint32_t refused;     // 1: this rank refused its arguments; text says why
    uint32_t padding;
    char text[224];
};
static_assert(sizeof(call_header) == 256);

struct heap_regions {  // byte offsets, R = world
    int64_t control = 0;   // control_block
    int64_t header = 0;    // [R] call_header                       row p written by rank p
    int64_t posted = 0;    // [R, 16] u32 epoch of header p          one cache line per writer
    int64_t done = 0;      // [R, 16] u32 epoch that rank p finished one cache line per writer
    int64_t topk_ids = 0;  // [R, max_tokens, k] i32                 row p written by rank p
    int64_t topk_weights = 0;  // [R, max_tokens, k] f32             row p written by rank p
    int64_t sent = 0;      // [R, send_chunks] u32 epoch             row p written by rank p
    int64_t arrivals = 0;  // [R, max_tokens, H] rows of rank p, in the order in which they are sent
    int64_t combined = 0;  // [R, job_chunks] u32 epoch              row p written by rank p
    int64_t planes = 0;    // [R, max_tokens, H_out] partial rows from rank p
};
constexpr int FLAG_LINE = 16;  // u32 per cache line

struct symmetric_heap {
    char *base[MAX_RANKS] = {};
    heap_regions offset;
    int world = 1;
    int rank = 0;
    int64_t max_tokens = 0;
    int64_t send_chunks = 0;
    int64_t job_chunks = 0;

    template <class T>
    MOE_TK_FN T *region(int owner, int64_t at) const { return reinterpret_cast<T *>(base[owner] + at); }

    MOE_TK_FN control_block *control(int owner) const { return region<control_block>(owner, offset.control); }
    MOE_TK_FN call_header *header(int owner, int from) const { return region<call_header>(owner, offset.header) + from; }
    MOE_TK_FN uint32_t *posted(int owner, int from) const { return region<uint32_t>(owner, offset.posted) + from * FLAG_LINE; }
    MOE_TK_FN uint32_t *done(int owner, int from) const { return region<uint32_t>(owner, offset.done) + from * FLAG_LINE; }
    MOE_TK_FN int32_t *topk_ids(int owner, int from, int64_t top_k) const {
        return region<int32_t>(owner, offset.topk_ids) + from * max_tokens * top_k;
    }
    MOE_TK_FN float *topk_weights(int owner, int from, int64_t top_k) const {
        return region<float>(owner, offset.topk_weights) + from * max_tokens * top_k;
    }
    MOE_TK_FN uint32_t *sent(int owner, int from, int64_t chunk) const {
        return region<uint32_t>(owner, offset.sent) + from * send_chunks + chunk;
    }
    MOE_TK_FN uint32_t *combined(int owner, int from, int64_t chunk) const {
        return region<uint32_t>(owner, offset.combined) + from * job_chunks + chunk;
    }
    template <class T>
    MOE_TK_FN T *arrivals(int owner, int from, int64_t row, int64_t width) const {
        return region<T>(owner, offset.arrivals) + (from * max_tokens + row) * width;
    }
    template <class T>
    MOE_TK_FN T *planes(int owner, int from, int64_t row, int64_t width) const {
        return region<T>(owner, offset.planes) + (from * max_tokens + row) * width;
    }
};

}  // namespace moe_tk::protocol
