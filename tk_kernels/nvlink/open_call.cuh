// First launch of a call: tells all ranks where this rank's tokens want to go, learns the same of them, sends the
// tokens, and builds the schedule tables. No host synchronisation, and the same launch for every routing.
//
// Roles: cluster 0 exchanges and builds (its 8 blocks are resident together by definition, so they may wait for each
// other); all other clusters note which ranks work for each of this rank's tokens, and send them there.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "build_tables.cuh"
#include "exchange.cuh"
#include "export_rows.cuh"

namespace moe_tk::nvlink {

__device__ __forceinline__ void exchange_and_build(const open_globals &g, uint32_t epoch, open_shared &s) {
    build_place me{int(blockIdx.x), int(threadIdx.x) / 32, int(threadIdx.x) % 32, int(threadIdx.x), 0};
    const build_arrays a = arrays_of(g, s);
    const uint32_t parity = epoch & 1;
    zero_chunks(g, me);
    send_routing(g, me, epoch);
    stamp_lap_block(stamp_kind::open_send);
    me.builders = await_headers(g, me, epoch, s);
    stamp_lap_block(stamp_kind::open_headers);
    if (me.block >= me.builders) return;  // nobody touches its shared memory any more
    build_pairs(g, me, s, a, parity);
    write_groups(g, me, s, a);
    write_blocks(g, me, a);
    stamp_lap_block(stamp_kind::open_tasks);
}

__global__ __cluster_dims__(OPEN_CLUSTER, 1, 1) __launch_bounds__(OPEN_THREADS, 1) void open_call(
    const __grid_constant__ open_globals g) {
    extern __shared__ __align__(16) uint8_t dynamic_shared[];
    stamps_begin(g.call, stamp_kernel::open_call);
    kittens::launch_dependent_grids();  // gather_gemm starts where there is room, and waits for this grid's end
    const uint32_t epoch = *g.call.epoch_ptr + 1;
    if (blockIdx.x < OPEN_CLUSTER) exchange_and_build(g, epoch, *reinterpret_cast<open_shared *>(dynamic_shared));
    else export_rows(g, epoch);
    __syncthreads();
    // All blocks have read the old epoch when the last one writes the new one.
    if (threadIdx.x == 0 && fetch_inc_wrap_acq_rel_gpu(g.blocks_done, gridDim.x - 1) == gridDim.x - 1) *g.epoch = epoch;
}

}  // namespace moe_tk::nvlink
