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

// ORDER routing: every thread's stores, fence.sys, cluster barrier, then st.release.sys of the epoch; await_headers acquires.
__device__ __forceinline__ void send_routing(const open_globals &g, const build_place &me, uint32_t epoch) {
    const call_view &c = g.call;
    const uint32_t parity = epoch & 1;
    const int pairs = g.refused ? 0 : g.num_tokens * c.top_k;
#pragma unroll 4
    for (int i = me.global_thread; i < pairs; i += BUILD_THREADS) {
        const int2 pair = make_int2(read_id(g, i), __float_as_int(read_weight(g, i)));
        for (int to = 0; to < c.world; ++to) c.routing(to, parity, c.rank)[i] = pair;
    }
    if (me.global_thread < c.world)
        *c.header(me.global_thread, parity, c.rank) = {g.signature, g.num_tokens, g.refused};
    fence_sys();
    cluster_barrier();
    if (me.global_thread < c.world) store_release_sys(c.posted(me.global_thread, c.rank), epoch);
    __syncwarp();
    if (me.global_thread == 0) store_release_sys(g.routing_sent, epoch);  // paces export_rows, orders nothing
}

static_assert(MAX_COL_GROUPS == 4, "zero_counters clears the counters of a row block and of a chunk as one vector");
__device__ __forceinline__ void zero_counters(const open_globals &g, const build_place &me) {
    const uint4 none{};
    for (int i = me.global_thread; i < g.max_blocks; i += BUILD_THREADS) {
        g.counters.l1_done[i] = 0;
        reinterpret_cast<uint4 *>(g.counters.l2_done)[i] = none;
    }
    for (int i = me.global_thread; i < g.call.world * g.call.job_chunks; i += BUILD_THREADS) {
        g.tables.chunk_expected[i] = 0;
        reinterpret_cast<uint4 *>(g.counters.job_done)[i] = none;
    }
    for (int i = me.global_thread; i < g.max_slots / 16; i += BUILD_THREADS) reinterpret_cast<uint4 *>(g.marks)[i] = none;
    if (me.global_thread == 0) *g.counters.next_item = 0;
}

// Watermarks of chunks for which this rank has had no work for a long time would seem to be ahead one day: every so often
// all of them are set to the call before, whose own watermarks this rank has published to the last.
__device__ __forceinline__ void refresh_watermarks(const open_globals &g, const build_place &me, uint32_t epoch) {
    if (!protocol::refreshes(epoch)) return;
    const int words = g.call.job_chunks * MAX_COL_GROUPS;
    for (int i = me.global_thread; i < g.call.world * words; i += BUILD_THREADS)
        g.call.combined(i / words, g.call.rank, 0, 0)[i % words] = epoch - 1;
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

// Waits for all ranks and leaves their token counts in shared memory; all zero if the call cannot be computed. All blocks
// of the cluster come to the same answer, else their tables would not fit together.
__device__ __forceinline__ void await_headers(const open_globals &g, const build_place &me, uint32_t epoch, open_shared &s) {
    const call_view &c = g.call;
    uint4 header{};
    if (me.warp == 0) {
        bool ok = true;
        if (me.lane < c.world) {
            ok = spin_until(c.posted(c.rank, me.lane), epoch, c, {phase_id::exchange, role_id::send, me.lane, me.lane});
            header = __ldcg(reinterpret_cast<const uint4 *>(c.header(c.rank, epoch & 1, me.lane)));
        }
        ok = __all_sync(0xffffffff, ok);
        const verdict v = judge(c, me.lane, uint64_t(header.y) << 32 | header.x, int(header.z), int(header.w));
        if (ok && v.reason != void_reason::none && me.global_thread == 0) {
            c.host->void_rank = v.rank, c.host->void_value = v.value;
            store_release_sys(&c.host->void_reason, uint32_t(v.reason));
        }
        if (me.lane == 0) g.scratch[me.block] = ok && v.reason == void_reason::none;
    }
    cluster_barrier();
    if (me.warp == 0) {
        const bool ok = __all_sync(0xffffffff, me.lane >= OPEN_CLUSTER || __ldcg(g.scratch + me.lane % OPEN_CLUSTER) != 0);
        const int count = ok && me.lane < c.world ? int(header.z) : 0;
        int sum = count;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int below = __shfl_up_sync(0xffffffff, sum, d);
            if (me.lane >= d) sum += below;
        }
        s.first_token[me.lane + 1] = sum;
        if (me.lane == 0) s.first_token[0] = 0;
        if (me.block == 0 && me.lane < c.world) g.tables.token_counts[me.lane] = count;
    }
    __syncthreads();
}

}  // namespace moe_tk::nvlink
