// The movers whose speed is measured: a few blocks that copy between this GPU's memory and that of its peers.
//
//   push: read here, write there.  pull: read there, write here.
//   words: 16-byte loads and stores by all threads.  bulk: one thread, cp.async.bulk through a ring in shared memory.
//   payload COPY moves real bytes; WIRE leaves out the local side (constant data pushed, pulled data dropped) and so
//   shows what the wire alone allows.
#pragma once

#include "support.cuh"

namespace moe_tk_probe {

inline constexpr int MAX_PEERS = 16;
inline constexpr int MOVE_THREADS = 1024;
inline constexpr uint32_t BULK_CHUNK = 16 * 1024, WORD_CHUNK = 64 * 1024;

enum payload : int { COPY = 0, WIRE = 1, PARKED = 2 }; // PARKED: occupy the SMs, move nothing

struct move_args {
    const char *from[MAX_PEERS];
    char *to[MAX_PEERS];
    int num_peers;
    int push;               // 1 push, 0 pull
    uint64_t bytes;         // of each buffer, a multiple of WORD_CHUNK
    uint64_t passes;        // over the buffers; 0: until *stop or the limit
    uint64_t limit_ns;
    const uint32_t *go;     // host memory: nobody moves before it is 1
    const uint32_t *stop;   // host memory, looked at when passes == 0
    uint64_t *began;        // [gridDim.x] ns of the global timer
    uint64_t *ended;        // [gridDim.x]
    uint64_t *chunks;       // [gridDim.x] chunks moved
    uint32_t *sink;         // never written in fact: keeps loads alive
};

// Chunk g of a mover: peers in turn, then the next place of the buffer.
struct place {
    int peer;
    uint64_t offset;
};
__device__ inline place place_of(const move_args &a, uint64_t g, uint32_t chunk) {
    const uint64_t turn = g / a.num_peers;
    return {static_cast<int>(g % a.num_peers), (turn % (a.bytes / chunk)) * chunk};
}

__device__ inline bool begin_together(const move_args &a) {
    __shared__ int started;
    if (threadIdx.x == 0) {
        started = wait_at_least(a.go, 1, a.limit_ns);
        a.began[blockIdx.x] = global_ns();
    }
    __syncthreads();
    return started != 0;
}

__device__ inline void finish(const move_args &a, uint64_t chunks) {
    a.chunks[blockIdx.x] = chunks;
    a.ended[blockIdx.x] = global_ns();
}

__device__ inline bool told_to_stop(const move_args &a) {
    return load_acquire_sys(a.stop) != 0 || global_ns() - a.began[blockIdx.x] > a.limit_ns;
}

// Words: every thread moves 4 x 16 bytes of a 64 KiB chunk; all four loads are in flight before the first store. PARKED
// works with any number of threads.
template <int PAYLOAD>
__global__ __launch_bounds__(MOVE_THREADS, 1) void move_words_kernel(move_args a) {
    constexpr int UNROLL = WORD_CHUNK / 16 / MOVE_THREADS;
    __shared__ int stop_now;
    if (!begin_together(a)) return;
    const uint64_t total = a.passes * a.num_peers * (a.bytes / WORD_CHUNK);
    uint64_t moved = 0;
    uint4 kept = make_uint4(threadIdx.x, 1, 2, 3);
    for (uint64_t g = blockIdx.x; a.passes == 0 || g < total; g += gridDim.x) {
        if (a.passes == 0 && moved % 16 == 0) {
            __syncthreads();
            if (threadIdx.x == 0) stop_now = told_to_stop(a);
            __syncthreads();
            if (stop_now) break;
        }
        ++moved;
        if constexpr (PAYLOAD == PARKED) {
            __nanosleep(1000);
            continue;
        }
        const place p = place_of(a, g, WORD_CHUNK);
        const uint4 *from = reinterpret_cast<const uint4 *>(a.from[p.peer] + p.offset) + threadIdx.x;
        uint4 *to = reinterpret_cast<uint4 *>(a.to[p.peer] + p.offset) + threadIdx.x;
        uint4 v[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            v[i] = (PAYLOAD == WIRE && a.push) ? kept : __ldcg(from + i * MOVE_THREADS);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            if (PAYLOAD == WIRE && !a.push) {
                kept.x ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
            } else {
                to[i * MOVE_THREADS] = v[i];
            }
        }
    }
    if (kept.x == 0x12345678u && kept.y == 9) *a.sink = kept.x;
    fence_sys(); // the stores have left this GPU before the clock is read
    __syncthreads();
    if (threadIdx.x == 0) finish(a, moved);
}

#ifdef MOE_TK_PROBE_BULK
// Ring of STAGES chunks; loads run AHEAD chunks before the stores that empty them again.
template <int STAGES>
struct ring {
    static constexpr int AHEAD = STAGES / 2;
    unsigned char *data;
    uint64_t *bars;
    __device__ unsigned char *slot(uint64_t i) const { return data + (i % STAGES) * BULK_CHUNK; }
    __device__ void load(uint64_t i, const char *from) const {
        mbarrier_expect_bytes(bars + i % STAGES, BULK_CHUNK);
        bulk_load(slot(i), from, BULK_CHUNK, bars + i % STAGES);
    }
    __device__ void await(uint64_t i) const {
        while (!mbarrier_try_wait(bars + i % STAGES, (i / STAGES) & 1)) {
        }
    }
};

template <int STAGES>
__device__ uint64_t bulk_copy(const move_args &a, const ring<STAGES> &r, uint64_t total) {
    constexpr int AHEAD = ring<STAGES>::AHEAD;
    uint64_t loads = 0, stores = 0; // of this block
    bool more = true;
    while (true) {
        const uint64_t g = blockIdx.x + loads * gridDim.x;
        more = more && (a.passes ? g < total : !(loads % 64 == 0 && told_to_stop(a)));
        if (more) {
            // slot of load i was last read by store i - STAGES; AHEAD - 1 newer stores may still be pending
            bulk_wait_read<STAGES - AHEAD - 1>();
            const place p = place_of(a, g, BULK_CHUNK);
            r.load(loads++, a.from[p.peer] + p.offset);
        }
        if (loads - stores > AHEAD || (!more && stores < loads)) {
            const place p = place_of(a, blockIdx.x + stores * gridDim.x, BULK_CHUNK);
            r.await(stores);
            bulk_store(a.to[p.peer] + p.offset, r.slot(stores), BULK_CHUNK);
            bulk_commit();
            ++stores;
        } else if (!more) {
            break;
        }
    }
    bulk_wait_written();
    return stores;
}

template <int STAGES>
__device__ uint64_t bulk_wire(const move_args &a, const ring<STAGES> &r, uint64_t total) {
    uint64_t i = 0, drained = 0;
    for (;; ++i) {
        const uint64_t g = blockIdx.x + i * gridDim.x;
        if (a.passes ? g >= total : (i % 64 == 0 && told_to_stop(a))) break;
        const place p = place_of(a, g, BULK_CHUNK);
        if (a.push) {
            bulk_store(a.to[p.peer] + p.offset, r.slot(i), BULK_CHUNK);
            bulk_commit();
            bulk_wait_read<STAGES - 1>();
        } else {
            if (i >= STAGES) r.await(drained++);
            r.load(i, a.from[p.peer] + p.offset);
        }
    }
    if (a.push) {
        bulk_wait_written();
    } else {
        while (drained < i) r.await(drained++);
    }
    return i;
}
#endif

template <int PAYLOAD, int STAGES>
__global__ __launch_bounds__(128, 1) void move_bulk_kernel(move_args a) {
#ifdef MOE_TK_PROBE_BULK
    extern __shared__ unsigned char dynamic[];
    auto *data = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(dynamic) + 127) & ~uintptr_t(127));
    __shared__ alignas(8) uint64_t bars[STAGES];
    for (uint32_t i = threadIdx.x; i < STAGES * BULK_CHUNK / 16; i += blockDim.x) {
        reinterpret_cast<uint4 *>(data)[i] = make_uint4(i * 2654435761u, i, ~i, blockIdx.x);
    }
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(bars + s, 1);
        fence_mbarrier_init();
    }
    fence_proxy_async(); // the fill above -> bulk stores of WIRE pushes
    if (!begin_together(a) || threadIdx.x != 0) return;
    const ring<STAGES> r{data, bars};
    const uint64_t total = a.passes * a.num_peers * (a.bytes / BULK_CHUNK);
    uint64_t moved = 0;
    if constexpr (PAYLOAD == COPY) moved = bulk_copy<STAGES>(a, r, total);
    if constexpr (PAYLOAD == WIRE) moved = bulk_wire<STAGES>(a, r, total);
    finish(a, moved);
#endif
}

} // namespace moe_tk_probe
