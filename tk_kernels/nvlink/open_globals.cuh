// What open_call is given, and where a thread of its building cluster stands.
#pragma once

#include <cooperative_groups.h>

#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

constexpr int OPEN_THREADS = 1024, OPEN_WARPS = OPEN_THREADS / 32;
constexpr int OPEN_SHARED_BYTES = 227 * 1024;  // dynamic, as much as a block can have
// Up to so many pairs one block does what else all of cluster 0 do: it needs no barrier of the cluster for it.
constexpr int ONE_SENDER_PAIRS = 4096, ONE_BUILDER_PAIRS = 2048;

// Division of small numbers by one that the host knows. Exact for numerators below 2^32 / divisor.
struct divisor {
    uint32_t value, magic;
    explicit divisor(int d) : value(uint32_t(d)), magic(uint32_t(0xffffffffull / uint32_t(d) + 1)) {}  // unused for 1
    __device__ __forceinline__ int divide(int n) const { return value == 1 ? n : int(__umulhi(uint32_t(n), magic)); }
};

struct open_shared {
    int first_token[MAX_WORLD + 1];  // ranks' tokens in one row, without gaps
    int warp_sum[2][OPEN_WARPS], round_sum[1][OPEN_WARPS];
    alignas(8) uint64_t room[];      // build_arrays
};

// How many warps of a block count pairs, each with a histogram of its own, and how many tokens a block has room for at once; more
// are taken in rounds.
struct open_room { int warps, tokens; };
constexpr int PAIR_BYTES = sizeof(int2) + sizeof(uint16_t), TOKEN_BYTES = sizeof(uint16_t);  // stash and sorted; last_rank
constexpr int GROUP_BYTES = 8 * OPEN_CLUSTER + sizeof(int2) + 4 * sizeof(int);               // inbox; places; the others of build_arrays
inline open_room room_for(int groups, int top_k, int bytes = OPEN_SHARED_BYTES) {
    constexpr int LEAST_PAIRS = 256;  // of a warp
    bytes -= int(sizeof(open_shared)) + GROUP_BYTES * groups + 4;  // one offset more than groups
#ifdef MOE_TK_TRACE
    bytes -= int(sizeof(stamp_room)) + 16;
#endif
    const auto tokens = [&](int warps) { return (bytes - 4 * warps * groups) / (top_k * PAIR_BYTES + TOKEN_BYTES); };
    int warps = OPEN_WARPS;
    while (warps > 4 && tokens(warps) * top_k < warps * LEAST_PAIRS) warps /= 2;
    return {warps, tokens(warps)};
}

struct open_globals {
    call_view call;
    table_view tables;
    counter_view counters;
    uint64_t signature;
    const void *hidden_states;  // [num_tokens, H] bf16, or e4m3 where hidden_scales are given
    const float *hidden_scales; // [num_tokens, H / 128], or nullptr
    const void *topk_ids;       // [num_tokens, k] i32 or i64
    const void *topk_weights;   // [num_tokens, k] f32 or bf16
    int num_tokens, refused, export_waits;
    int quantise;               // rows are sent as e4m3 with scales
    int ids_are_64, weights_are_bf16;
    int num_experts, first_expert, num_local, tensor_parallel;
    divisor choices, chunks;    // by k, by job_chunk
    int row_block, segments, max_blocks, max_slots;
    int col_blocks1, col_blocks2;  // of the two GEMMs
    int per_step2, passes;      // column blocks of GEMM 2 in GROUP_COLS; passes over its columns
    uint32_t *epoch;            // written by the last block
    uint32_t *blocks_done, *copies_done;  // self-resetting
    uint32_t *routing_sent;     // epoch
    open_room room;
    int one_sender_pairs, one_builder_pairs;
};

struct build_place {  // where a thread stands in cluster 0
    int block, warp, lane, thread;
    int builders;  // 1 or OPEN_CLUSTER, once the headers are there
};

// The arrays of open_shared::room. Rounds: those of build_pairs.
struct build_arrays {
    uint64_t *inbox;      // [OPEN_CLUSTER, groups] group_counts of each block, written by that block
    int2 *stash;          // [room.tokens, k] pair_key and weight of each pair of a round
    int2 *places;         // [groups] of the block's pairs in this round: the first one among all of them, and its slot
    int *offset;          // [groups + 1] first slot
    int *total;           // [groups] rows
    int *first_job;       // [groups] of this block in this round
    uint32_t *in_round;   // [groups] round_counts of this block
    uint32_t *histogram;  // [room.warps, groups] round_counts of each warp, then of the warps before it
    uint16_t *sorted;     // [room.tokens * k] pairs of the round in the order of their slots, as indices of stash
    uint16_t *last_rank;  // [room.tokens] how many pairs that are their token's last one the warp has had before this token's
};
__device__ __forceinline__ build_arrays arrays_of(const open_globals &g, open_shared &s) {
    const int groups = g.segments * g.num_local, pairs = g.room.tokens * g.call.top_k;
    build_arrays a;
    a.inbox = s.room;
    a.stash = reinterpret_cast<int2 *>(a.inbox + OPEN_CLUSTER * groups);
    a.places = a.stash + pairs;
    a.offset = reinterpret_cast<int *>(a.places + groups);
    a.total = a.offset + groups + 1, a.first_job = a.total + groups;
    a.in_round = reinterpret_cast<uint32_t *>(a.first_job + groups), a.histogram = a.in_round + groups;
    a.sorted = reinterpret_cast<uint16_t *>(a.histogram + g.room.warps * groups), a.last_rank = a.sorted + pairs;
    return a;
}

// Rank of an expert in EP: counts differ by at most one, the first ranks have the larger ones.
__device__ __forceinline__ int owner_of(const open_globals &g, int id) {
    const int base = g.num_experts / g.call.world, extra = g.num_experts % g.call.world, large = extra * (base + 1);
    return id < large ? id / (base + 1) : extra + (id - large) / max(base, 1);
}

// The same place in the shared memory of another block of the cluster, which must have begun and must not have left.
template <class T> __device__ __forceinline__ T *in_block(T *mine, int block) {
    return cooperative_groups::this_cluster().map_shared_rank(mine, block);
}
// A barrier of cluster 0, by all threads. What threads wrote that say `release` is visible to all behind it, and what they had
// seen: a warp is told of its block's stores by __syncthreads(). Others do not wait for their stores. Whole warps agree.
__device__ __forceinline__ void cluster_barrier(bool release) {
    if (release) cluster_arrive_release();
    else cluster_arrive_relaxed();
    cluster_wait_acquire();
}

}  // namespace moe_tk::nvlink
