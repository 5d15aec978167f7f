// Exchange of routing: every rank writes its pairs and its header into every rank's memory, then waits for theirs.
#pragma once

#include "open_globals.cuh"

namespace moe_tk::nvlink {

__device__ __forceinline__ int read_id(const open_globals &g, int64_t i) {
    const int64_t id = g.ids_are_64 ? static_cast<const int64_t *>(g.topk_ids)[i] : static_cast<const int32_t *>(g.topk_ids)[i];
    return id < 0 || id >= g.num_experts ? -1 : int(id);
}
__device__ __forceinline__ float read_weight(const open_globals &g, int64_t i) {
    if (!g.weights_are_bf16) return static_cast<const float *>(g.topk_weights)[i];
    return __uint_as_float(uint32_t(static_cast<const uint16_t *>(g.topk_weights)[i]) << 16);
}

// ORDER routing: the stores of all senders; in each sending block __syncthreads(), then thread 0's fence.sys; the barrier of the
// cluster, which its warp 0 releases; then block 0's st.release.sys of the epoch. await_headers acquires.
__device__ __forceinline__ void send_routing(const open_globals &g, const build_place &me, uint32_t epoch) {
    const call_view &c = g.call;
    const uint32_t parity = epoch & 1;
    const int pairs = g.refused ? 0 : g.num_tokens * c.top_k, senders = pairs <= g.one_sender_pairs ? 1 : OPEN_CLUSTER;
    if (me.block < senders) {
        constexpr int BATCH = 4;  // whose loads are in flight together
        const int stride = senders * OPEN_THREADS;
#pragma unroll 1
        for (int first = me.block * OPEN_THREADS + me.thread; first < pairs; first += BATCH * stride) {
            int2 pair[BATCH];
#pragma unroll
            for (int u = 0; u < BATCH; ++u) {
                const int i = min(first + u * stride, pairs - 1);
                pair[u] = {read_id(g, i), __float_as_int(read_weight(g, i))};
            }
#pragma unroll 1
            for (int to = 0; to < c.world; ++to) {
                int2 *routing = c.routing(to, parity, c.rank) + first;
#pragma unroll
                for (int u = 0; u < BATCH; ++u)
                    if (first + u * stride < pairs) routing[u * stride] = pair[u];
            }
        }
        if (me.block == 0 && me.thread < c.world)
            *c.header(me.thread, parity, c.rank) = {g.signature, g.num_tokens, g.refused};
        __syncthreads();
        if (senders > 1 && me.thread == 0) fence_sys();
        __syncwarp();
    }
    cluster_barrier(senders > 1 && me.warp == 0);  // 1 of 3: all blocks have begun, and sent
    if (me.block != 0 || me.warp != 0) return;
    if (me.lane < c.world) store_release_sys(c.posted(me.lane, c.rank), epoch);
    __syncwarp();
    if (me.lane == 0) store_relaxed_sys(g.routing_sent, epoch);  // paces export_rows, orders nothing
}

// What the headers of all ranks amount to, one rank per lane: the first reason in rank order, the same on all ranks.
struct verdict {
    void_reason reason;
    int rank, value;
};
__device__ __forceinline__ verdict judge(const call_view &c, int lane, uint64_t signature, int num_tokens, int refused) {
    const bool real = lane < c.world;
    const uint64_t wanted = __shfl_sync(0xffffffff, signature, 0);
    const auto first_of = [&](bool bad) { return __ffs(__ballot_sync(0xffffffff, real && bad)) - 1; };
    const int by_refusal = first_of(refused), by_signature = first_of(signature != wanted), by_size = first_of(num_tokens > c.max_tokens);
    verdict v{void_reason::none, 0, 0};
    if (by_refusal >= 0) v = {void_reason::refused, by_refusal, 0};
    else if (by_signature >= 0) v = {void_reason::disagree, by_signature, 0};
    else if (by_size >= 0) v = {void_reason::capacity, by_size, 0};
    v.value = __shfl_sync(0xffffffff, num_tokens, v.rank);
    return v;
}

// Block 0 waits for all ranks and tells the other blocks their token counts: all zero if the call cannot be computed. Returns
// how many blocks build. One warp decides for all: if each block waited for itself, one might come to another answer.
__device__ __forceinline__ int await_headers(const open_globals &g, const build_place &me, uint32_t epoch, open_shared &s) {
    const call_view &c = g.call;
    if (me.block == 0 && me.warp == 0) {
        bool ok = true;
        uint4 header{};
        if (me.lane < c.world) {
            ok = spin_until(c.posted(c.rank, me.lane), epoch, c, {phase_id::exchange, role_id::send, me.lane, me.lane});
            header = __ldcg(reinterpret_cast<const uint4 *>(c.header(c.rank, epoch & 1, me.lane)));
        }
        ok = __all_sync(0xffffffff, ok);
        const verdict v = judge(c, me.lane, uint64_t(header.y) << 32 | header.x, int(header.z), int(header.w));
        if (ok && v.reason != void_reason::none && me.lane == 0) {
            c.host->void_rank = v.rank, c.host->void_value = v.value;
            store_release_sys(&c.host->void_reason, uint32_t(v.reason));
        }
        const int count = ok && v.reason == void_reason::none && me.lane < c.world ? int(header.z) : 0;
        int sum = count;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(0xffffffff, sum, d);
            if (me.lane >= d) sum += below;
        }
        for (int block = 0; block < OPEN_CLUSTER; ++block) {  // which have begun, and wait below
            int *first_token = in_block(s.first_token, block);
            first_token[me.lane + 1] = sum;
            if (me.lane == 0) first_token[0] = 0;
        }
    }
    cluster_barrier(me.block == 0 && me.warp == 0);  // 2 of 3: pairs with itself; also passes on the routing that warp 0 acquired
    return int64_t(s.first_token[c.world]) * c.top_k <= g.one_builder_pairs ? 1 : OPEN_CLUSTER;
}

}  // namespace moe_tk::nvlink
