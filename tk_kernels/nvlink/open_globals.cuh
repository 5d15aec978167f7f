// What open_call is given, and where a thread of its building cluster stands.
#pragma once

#include <cooperative_groups.h>

#include "tables.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

constexpr int OPEN_THREADS = 1024, OPEN_WARPS = OPEN_THREADS / 32;
constexpr int BUILD_THREADS = OPEN_CLUSTER * OPEN_THREADS, BUILD_WARPS = OPEN_CLUSTER * OPEN_WARPS;

// Division of small numbers by one that the host knows. Exact for numerators below 2^32 / divisor.
struct divisor {
    uint32_t value, magic;
    explicit divisor(int d) : value(uint32_t(d)), magic(uint32_t(0xffffffffull / uint32_t(d) + 1)) {}  // unused for 1
    __device__ __forceinline__ int divide(int n) const { return value == 1 ? n : int(__umulhi(uint32_t(n), magic)); }
};

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
    divisor choices;            // by k
    int row_block, segments, max_blocks, max_slots;
    int col_blocks1, col_blocks2;  // of the two GEMMs
    int per_step2, passes;      // column blocks of GEMM 2 in GROUP_COLS; passes over its columns
    uint32_t *epoch;            // written by the last block
    uint32_t *blocks_done, *copies_done;  // self-resetting
    uint32_t *routing_sent;     // epoch
    int *scratch;               // [SCRATCH_INTS]
    uint8_t *marks;             // [max_slots]
};

struct open_shared {
    int first_token[MAX_WORLD + 1];  // ranks' tokens in one row, without gaps
    int offset[MAX_GROUPS + 1], total[MAX_GROUPS], first_slot[MAX_GROUPS];  // the last: of this block's first pair
    int warp_sum[2][OPEN_WARPS];
    uint32_t histogram[];  // [OPEN_WARPS, groups]
};
inline int open_shared_bytes(int groups) {
    const int bytes = int(sizeof(open_shared)) + OPEN_WARPS * groups * 4;
#ifdef MOE_TK_TRACE
    return (bytes + 15) / 16 * 16 + int(sizeof(stamp_room));
#endif
    return bytes;
}

struct build_place {  // where a thread stands in cluster 0
    int block, warp, lane, thread, global_warp, global_thread;
};

// Rank of an expert in EP: counts differ by at most one, the first ranks have the larger ones.
__device__ __forceinline__ int owner_of(const open_globals &g, int id) {
    const int base = g.num_experts / g.call.world, extra = g.num_experts % g.call.world, large = extra * (base + 1);
    return id < large ? id / (base + 1) : extra + (id - large) / max(base, 1);
}

__device__ __forceinline__ void cluster_barrier() { cooperative_groups::this_cluster().sync(); }

}  // namespace moe_tk::nvlink
