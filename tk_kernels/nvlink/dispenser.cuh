// Items of a list, dispensed to warps, so that any number of them works through it.
#pragma once

#include "../../thunderkittens/kittens.cuh"
#include "device_ops.cuh"

namespace moe_tk::nvlink {

// Whole warps: number of the next item, the same in all lanes.
__device__ __forceinline__ int take_item(uint32_t *dispenser) {
    int item = 0;
    if (kittens::laneid() == 0) item = int(fetch_add_relaxed_gpu(dispenser, 1u));
    return __shfl_sync(0xffffffff, item, 0);
}

}  // namespace moe_tk::nvlink
