// Where the rows of a call lie: in this rank's tensor, or in what their owners have sent.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "wait.cuh"

namespace moe_tk::nvlink {

// Row of a pair, in this rank's tensor or in what its owner has sent.
template <class T> __device__ __forceinline__ const uint8_t *row_of_pair(const call_view &c, const T *tokens, int pair) {
    const int row = pair / c.top_k, source = row / c.max_tokens, token = row % c.max_tokens;
    const T *at = sizeof(T) != 1 && source == c.rank ? tokens + int64_t(token) * c.hidden : c.row<const T>(c.rank, source, token);
    return reinterpret_cast<const uint8_t *>(at);
}

// ORDER rows: a lane for each rank acquires what its export_rows releases; __syncwarp hands that on to all lanes, which then copy.
// After a wait that was given up the kernel goes on with whatever rows there are.
__device__ __forceinline__ void wait_for_rows(const call_view &c) {
    const int from = kittens::laneid();
    if (from < c.world && (from != c.rank || c.keeps_own))
        spin_until(c.rows_posted(c.rank, from), *c.epoch_ptr, c, {phase_id::dispatch, role_id::place, from, from});
    __syncwarp();
}

}  // namespace moe_tk::nvlink
