// Two GPUs compare their clocks: one thread of each, a word to and fro through symmetric memory. Only in traced modules.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace moe_tk::nvlink {

struct clock_words {    // in symmetric memory, one per rank
    uint32_t ping;      // round, written by the asking rank
    uint32_t pong;      // round, written by the answering one ..
    uint64_t answer_ns; // .. after its clock
};

// Both ranks launch it, one with asks = 1. Times out after a second. `samples` [rounds, 3] of the asking rank: its clock before
// and after a round, and the other's between; zero for rounds that did not happen.
void launch_clock_sync(clock_words *mine, clock_words *theirs, bool asks, uint32_t first_round, int rounds, uint64_t *samples,
                       cudaStream_t stream);

}  // namespace moe_tk::nvlink
