// Whether a call has come to a result, asked on the device when its last launch is done.
#pragma once

#include "exchange.cuh"

namespace moe_tk::nvlink {

// By all lanes of a warp. False if some rank refused the call, ranks disagreed about it, or any wait of it was given up, here or
// on another rank; the latter is told to the host, which need not know: perhaps nothing was left to wait for here.
// ORDER outcome: a wait that gives up takes record_claim before it lets its kernel go on, and this runs in a later kernel.
__device__ __forceinline__ bool call_is_good(const call_view &c) {
    const int lane = threadIdx.x % 32;
    uint4 header{};
    if (lane < c.world) header = __ldcg(reinterpret_cast<const uint4 *>(c.header(c.rank, *c.epoch_ptr & 1, lane)));
    const verdict v = judge(c, lane, uint64_t(header.y) << 32 | header.x, int(header.z), int(header.w));
    const bool given_up = load_relaxed_sys(&c.control(c.rank)->abort_flag) != 0 || load_relaxed_sys(c.record_claim) != 0;
    if (given_up && lane == 0) report_told(c);
    return v.reason == void_reason::none && !given_up;
}
// The same for a whole block.
__device__ __forceinline__ bool block_call_is_good(const call_view &c) {
    __shared__ int good;
    if (threadIdx.x < 32) {
        const bool mine = call_is_good(c);
        if (threadIdx.x == 0) good = mine;
    }
    __syncthreads();
    return good;
}

constexpr uint32_t TWO_NANS = 0x7fff7fffu;  // bf16

}  // namespace moe_tk::nvlink
