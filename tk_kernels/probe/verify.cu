// Write and read back between two GPUs, as the layer's kernels will do it: data by 16-byte stores or by bulk copies, then
// a local election among the blocks, fence.sys, one release store into the other GPU's memory, which polls it locally.
//
//   push: `mover` writes into memory of `keeper`; the keeper waits for the flag in its own memory and checks its buffer.
//   pull: `keeper` fills its own buffer and releases a flag in memory of `mover`, which then reads the buffer and checks.
//
// Several rounds with other data in the same place: what was cached in an earlier round is found out.
#include "support.cuh"
#include "verify_plan.hpp"

namespace moe_tk_probe {
namespace {

constexpr int THREADS = 256, BLOCKS = 8, ROUNDS = 3;
constexpr uint32_t CHUNK = 8 * 1024; // bytes of one bulk copy

__device__ void judge(word16 seen, uint64_t word, uint64_t seed, finding *out) {
    const word16 want = pattern(word, seed);
    if (seen.x == want.x && seen.y == want.y) return;
    atomicAdd(&out->bad, 1ull);
    atomicMin(&out->first_bad, static_cast<unsigned long long>(word * 16));
}

// ORDER published: acquires what publish() released. Every block polls its own GPU's memory.
__device__ bool await(const uint32_t *local_flag, uint32_t epoch, uint64_t limit_ns, finding *out) {
    __shared__ int arrived;
    if (threadIdx.x == 0) {
        arrived = wait_at_least(local_flag, epoch, limit_ns);
        if (!arrived) atomicExch(&out->timed_out, 1u);
    }
    __syncthreads();
    return arrived != 0;
}

// The last block of the grid publishes for all. ORDER published: acquired by await().
__device__ void publish(const verify_args &a) {
    __syncthreads();
    if (threadIdx.x == 0) {
        const uint32_t before = atom_add_acq_rel_gpu(a.arrivals, 1);
        if (sends_flag(a, before, gridDim.x)) {
            fence_sys();
            store_release_sys(a.flag, a.epoch);
        }
    }
}

__device__ void fill(const verify_args &a) {
    for (uint64_t w = blockIdx.x * blockDim.x + threadIdx.x; w < a.words; w += uint64_t(gridDim.x) * blockDim.x) {
        a.source[w] = written(a, w);
    }
}

#ifdef MOE_TK_PROBE_BULK
// One chunk of global memory (anybody's) into shared memory; all threads return when it is there.
__device__ void fetch_chunk(void *shared, const void *global, uint64_t *bar, uint32_t &parity) {
    if (threadIdx.x == 0) {
        mbarrier_expect_bytes(bar, CHUNK);
        bulk_load(shared, global, CHUNK, bar);
    }
    while (!mbarrier_try_wait(bar, parity)) {
    }
    parity ^= 1;
}
#endif

// Moves source to target (from or to the peer) by bulk copies, or checks what it reads on the way (check != nullptr).
__device__ void move_bulk(const verify_args &a, finding *check) {
#ifdef MOE_TK_PROBE_BULK
    __shared__ alignas(128) unsigned char chunk[CHUNK];
    __shared__ alignas(8) uint64_t bar;
    if (threadIdx.x == 0) {
        mbarrier_init(&bar, 1);
        fence_mbarrier_init();
        fence_proxy_async(); // earlier generic writes by this GPU, or acquired ones of the peer -> bulk loads below
    }
    __syncthreads();
    uint32_t parity = 0;
    constexpr uint64_t WORDS = CHUNK / 16;
    for (uint64_t c = blockIdx.x; c < a.words / WORDS; c += gridDim.x) {
        fetch_chunk(chunk, a.source + c * WORDS, &bar, parity);
        if (check) {
            for (uint64_t w = threadIdx.x; w < WORDS; w += blockDim.x) {
                judge(reinterpret_cast<word16 *>(chunk)[w], c * WORDS + w, a.seed, check);
            }
        }
        if (threadIdx.x == 0) {
            bulk_store(a.target + c * WORDS, chunk, CHUNK);
            bulk_commit();
            bulk_wait_written(); // full wait: the bytes are in the target's memory
        }
        __syncthreads();
    }
#endif
}

__device__ void move_words(const verify_args &a, finding *check) {
    for (uint64_t w = blockIdx.x * blockDim.x + threadIdx.x; w < a.words; w += uint64_t(gridDim.x) * blockDim.x) {
        const word16 v = a.source[w];
        if (check) judge(v, w, a.seed, check);
        a.target[w] = v;
    }
}

__global__ void fill_kernel(verify_args a) { fill(a); }

__global__ __launch_bounds__(THREADS) void push_writer(verify_args a) {
    if (a.bulk) {
        move_bulk(a, nullptr);
    } else {
        move_words(a, nullptr);
    }
    publish(a);
}

__global__ __launch_bounds__(THREADS) void push_checker(verify_args a) {
    if (!await(a.flag, a.epoch, a.limit_ns, a.out)) return;
#ifdef MOE_TK_PROBE_BULK
    if (a.bulk) {
        __shared__ alignas(128) unsigned char chunk[CHUNK];
        __shared__ alignas(8) uint64_t bar;
        if (threadIdx.x == 0) {
            mbarrier_init(&bar, 1);
            fence_mbarrier_init();
            fence_proxy_async(); // acquired writes of the peer -> bulk loads below
        }
        __syncthreads();
        uint32_t parity = 0;
        constexpr uint64_t WORDS = CHUNK / 16;
        for (uint64_t c = blockIdx.x; c < a.words / WORDS; c += gridDim.x) {
            fetch_chunk(chunk, a.target + c * WORDS, &bar, parity);
            for (uint64_t w = threadIdx.x; w < WORDS; w += blockDim.x) {
                judge(reinterpret_cast<word16 *>(chunk)[w], c * WORDS + w, a.seed, a.out);
            }
            __syncthreads();
        }
        return;
    }
#endif
    for (uint64_t w = blockIdx.x * blockDim.x + threadIdx.x; w < a.words; w += uint64_t(gridDim.x) * blockDim.x) {
        judge(a.target[w], w, a.seed, a.out);
    }
}

__global__ __launch_bounds__(THREADS) void pull_owner(verify_args a) {
    fill(a);
#ifdef MOE_TK_PROBE_BULK
    fence_proxy_async(); // generic writes -> the peer's bulk loads
#endif
    publish(a);
}

__global__ __launch_bounds__(THREADS) void pull_reader(verify_args a) {
    if (!await(a.flag, a.epoch, a.limit_ns, a.out)) return;
    if (a.bulk) {
        move_bulk(a, a.out);
    } else {
        move_words(a, a.out);
    }
}

struct round_result {
    finding found;
    uint64_t seen, want;
};

void verify(const verify_request &request, round_result &result, int &round) {
    const int mover = request.mover, keeper = request.keeper;
    const bool push = request.push;
    enable_peer(mover, keeper);
    enable_peer(keeper, mover); // the flag of a pull travels the other way
    const int publisher = push ? mover : keeper, waiter = push ? keeper : mover;
    buffer source(publisher, request.bytes), target(waiter, request.bytes), arrivals(publisher, 256), flag(waiter, 256);
    buffer out(waiter, sizeof(finding));
    arrivals.fill(0);
    flag.fill(0);
    const verify_memory memory{source.as<word16>(), target.as<word16>(), arrivals.as<uint32_t>(), flag.as<uint32_t>(),
                               out.as<finding>()};
    stream publish_stream(publisher), wait_stream(waiter);
    for (round = 0; round < ROUNDS; ++round) {
        target.fill(0xa5 + round); // poison: an early look cannot be right
        const finding clean{~0ull, 0, 0, 0};
        MOE_TK_PROBE_CHECK(cudaMemcpy(out.as(), &clean, sizeof clean, cudaMemcpyDefault));
        const verify_args a = args_of(request, memory, round);
        if (push) {
            MOE_TK_PROBE_CHECK(cudaSetDevice(publisher));
            fill_kernel<<<BLOCKS, THREADS, 0, publish_stream.get()>>>(a);
            MOE_TK_PROBE_CHECK(cudaGetLastError());
            publish_stream.wait();
        }
        MOE_TK_PROBE_CHECK(cudaSetDevice(waiter));
        if (push) {
            push_checker<<<BLOCKS, THREADS, 0, wait_stream.get()>>>(a);
        } else {
            pull_reader<<<BLOCKS, THREADS, 0, wait_stream.get()>>>(a);
        }
        MOE_TK_PROBE_CHECK(cudaGetLastError());
        MOE_TK_PROBE_CHECK(cudaSetDevice(publisher));
        if (push) {
            push_writer<<<BLOCKS, THREADS, 0, publish_stream.get()>>>(a);
        } else {
            pull_owner<<<BLOCKS, THREADS, 0, publish_stream.get()>>>(a);
        }
        MOE_TK_PROBE_CHECK(cudaGetLastError());
        wait_stream.wait();
        publish_stream.wait();
        result.found = read_back(out.as<finding>());
        if (result.found.timed_out || result.found.bad) break;
        // A pull must also have left the right bytes in the mover's memory: one look from the host.
        const uint64_t last = a.words - 1;
        result.seen = read_back(reinterpret_cast<uint64_t *>(a.target + last));
        result.want = pattern(last, a.seed).x;
        if (result.seen != result.want) {
            result.found.first_bad = last * 16;
            result.found.bad = 1;
            return;
        }
    }
    if (result.found.bad) {
        result.want = pattern(result.found.first_bad / 16, seed_of(round)).x;
        result.seen = read_back(reinterpret_cast<uint64_t *>(target.as() + result.found.first_bad));
    }
}

// Loads every kernel of this file on the device: lazy loading while a peer spins could block.
void preload(int device) {
    MOE_TK_PROBE_CHECK(cudaSetDevice(device));
    cudaFuncAttributes attributes;
    MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, fill_kernel));
    MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, push_writer));
    MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, push_checker));
    MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, pull_owner));
    MOE_TK_PROBE_CHECK(cudaFuncGetAttributes(&attributes, pull_reader));
}

} // namespace
} // namespace moe_tk_probe

// push != 0: mover writes into keeper's memory, else it reads from there. bulk != 0: bulk copies, else 16-byte accesses.
// fault: 0; tests make a mistake on purpose (1 one wrong word, 2 the flag is never sent).
// out[0..5]: timed out, differing 16-byte words, byte offset of the first, value seen there, value wanted, round.
MOE_TK_PROBE_API int moe_tk_probe_verify(int mover, int keeper, int push, int bulk, uint64_t bytes, double limit_s,
                                         int fault, uint64_t *out) {
    using namespace moe_tk_probe;
    return guarded([&] {
        if (bytes == 0 || bytes % CHUNK) throw std::runtime_error("verify: bytes must be a multiple of 8192");
        if (bulk && !(has_bulk(mover) && has_bulk(keeper))) {
            throw std::runtime_error("verify: bulk copies need compute capability 9.0 on both GPUs");
        }
        preload(mover);
        preload(keeper);
        round_result result{};
        int round = 0;
        verify({mover, keeper, push != 0, bulk != 0, bytes, limit_s, fault}, result, round);
        out[0] = result.found.timed_out;
        out[1] = result.found.bad;
        out[2] = result.found.first_bad;
        out[3] = result.seen;
        out[4] = result.want;
        out[5] = static_cast<uint64_t>(round);
    });
}
