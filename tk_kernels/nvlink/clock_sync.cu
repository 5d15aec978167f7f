// The kernel that compares the clocks of two GPUs.
#include "clock_sync.cuh"

#include <stdexcept>
#include <string>

#include "device_ops.cuh"

namespace moe_tk::nvlink {

namespace {

constexpr uint64_t LIMIT_NS = 1'000'000'000;

__device__ bool comes_to(const uint32_t *word, uint32_t want, uint64_t begin) {
    while (load_acquire_sys(word) != want)
        if (now_ns() - begin > LIMIT_NS) return false;
    return true;
}

__global__ void clock_sync(clock_words *mine, clock_words *theirs, bool asks, uint32_t first_round, int rounds, uint64_t *samples) {
    const uint64_t begin = now_ns();
    for (int i = 0; i < rounds; ++i) {
        const uint32_t round = first_round + i;
        if (asks) {
            const uint64_t before = now_ns();
            store_release_sys(&theirs->ping, round);
            if (!comes_to(&mine->pong, round, begin)) return;
            samples[3 * i + 1] = now_ns();
            samples[3 * i] = before, samples[3 * i + 2] = *reinterpret_cast<volatile uint64_t *>(&mine->answer_ns);
        } else {
            if (!comes_to(&mine->ping, round, begin)) return;
            *reinterpret_cast<volatile uint64_t *>(&theirs->answer_ns) = now_ns();
            store_release_sys(&theirs->pong, round);
        }
    }
}

}  // namespace

void launch_clock_sync(clock_words *mine, clock_words *theirs, bool asks, uint32_t first_round, int rounds, uint64_t *samples,
                       cudaStream_t stream) {
    clock_sync<<<1, 1, 0, stream>>>(mine, theirs, asks, first_round, rounds, samples);
    const cudaError_t err = cudaGetLastError();
    if (err != cudaSuccess) throw std::runtime_error(std::string("clock_sync launch: ") + cudaGetErrorString(err));
}

}  // namespace moe_tk::nvlink
