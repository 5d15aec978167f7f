// The no-op twins of the gate and push hooks: they compile to nothing.
#pragma once

#include "../engine/tile_task.cuh"

namespace moe_tk {

struct no_gate {
    static constexpr bool NOOP = true;
    struct params {};
    __device__ static bool ready(const params &, const tile_task &) { return true; }
    __device__ static void wait(const params &, const tile_task &) {}
};

struct no_push {
    static constexpr bool NOOP = true;
    struct params {};
    __device__ static void publish(const params &, const tile_task &) {}
};

}  // namespace moe_tk
