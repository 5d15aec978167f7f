// Where the rows of a call lie: in this rank's tensor, or in what their owners have sent. All are there when open_call is over.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "call.cuh"

namespace moe_tk::nvlink {

// Row of a pair, in this rank's tensor or in what its owner has sent.
template <class T> __device__ __forceinline__ const uint8_t *row_of_pair(const call_view &c, const T *tokens, int pair) {
    const int row = pair / c.top_k, source = row / c.max_tokens, token = row % c.max_tokens;
    const T *at = sizeof(T) != 1 && source == c.rank ? tokens + int64_t(token) * c.hidden : c.row<const T>(c.rank, source, token);
    return reinterpret_cast<const uint8_t *>(at);
}

}  // namespace moe_tk::nvlink
