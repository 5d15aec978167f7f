// Stamps: who did what when inside the kernels. Nothing at all unless the module is compiled with -DMOE_TK_TRACE.
//
// Each warp of each block is one writer with a region of records of its own: no atomics, one counter in shared memory. A writer
// says what it has been doing since it last spoke ("lap"), so its laps tile its life without gaps. moe_tk.trace reads them.
#pragma once

#include <cstdint>

#ifdef MOE_TK_TRACE
#include "platform.hpp"
#endif

namespace moe_tk {

enum class stamp_kind : uint32_t {  // moe_tk.trace.kinds names the same, in the same order
    none,
    launch_wait,                                                        // for the launch before this one
    open_send, open_headers, open_count, open_groups, open_pairs, open_tasks,  // open_call: tables
    open_zero, open_export, open_rows,                                  // open_call: counters, rows, those of others
    load_ahead, gate, load,                                             // loaders: weights before the rows, gemm_scatter's gate, all else
    input_wait, multiply, emit, skip,                                   // consumer
    output_wait, store, push,                                           // storer
    combine_wait, combine, reduce_wait, reduce                          // whoever combines, a batch at a time
};
enum class stamp_kernel : uint32_t { open_call, gather_gemm, gemm_scatter };
constexpr int STAMP_KERNELS = 3, STAMP_WRITERS = 12;  // writers of a block: the warps of a GEMM's block; the first of open_call's

struct stamp_header {     // one per writer
    uint64_t begin_ns;    // %globaltimer when the block began: ticks every 32 ns on H200, the same on all multiprocessors
    uint32_t begin_clock; // %clock then: cycles of its multiprocessor
    uint32_t count;       // laps; those beyond the capacity are counted and not kept
};
struct stamp_record {
    uint32_t begin_ns, end_ns;  // low halves
    uint32_t end_clock;         // for the rate at which the multiprocessor ran
    uint32_t what;              // kind << 24 | detail
};
static_assert(sizeof(stamp_header) == 16 && sizeof(stamp_record) == 16);

struct stamp_buffer {      // [STAMP_KERNELS, blocks, STAMP_WRITERS] headers, each with `capacity` records
    stamp_header *headers;
    stamp_record *records;
    uint32_t blocks, capacity;
};

// The detail of a tile: 16 bits of row block, 8 of column block.
template <class Task> __device__ __forceinline__ uint32_t stamp_tile(const Task &t) {
    return uint32_t(t.row_block) << 8 | uint32_t(t.col_block & 0xff);
}

// The detail of a batch: 4 bits of column group, 20 of its first job or token.
__device__ __forceinline__ uint32_t stamp_batch(int group, int first) { return uint32_t(group) << 20 | (uint32_t(first) & 0xfffffu); }

#ifdef MOE_TK_TRACE

struct alignas(16) stamp_room { uint8_t bytes[128]; };
constexpr int STAMP_SHARED_BYTES = int(sizeof(stamp_room));  // for a kernel without other dynamic shared memory
struct stamp_state {       // of one block, in shared memory
    stamp_header *header;  // of writer 0; nullptr: nobody writes
    stamp_record *record;
    uint32_t capacity, count[STAMP_WRITERS], last_ns[STAMP_WRITERS];
};
static_assert(sizeof(stamp_state) <= sizeof(stamp_room));
// In the last bytes of the launch's shared memory: whoever sizes that has a stamp_room at its end, or padding behind one.
__device__ __forceinline__ stamp_state &stamps() {
    extern __shared__ __align__(16) uint8_t stamps_dynamic_shared[];
    return *reinterpret_cast<stamp_state *>(stamps_dynamic_shared + platform::device_side::dynamic_shared_bytes() - sizeof(stamp_room));
}
__device__ __forceinline__ uint32_t stamp_clock() { return platform::device_side::clock_cycles(); }
__device__ __forceinline__ uint64_t stamp_ns() { return platform::device_side::now_ns(); }

// All threads of a block, before its first __syncthreads().
template <class Call> __device__ __forceinline__ void stamps_begin(const Call &call, stamp_kernel kernel) {
    const stamp_buffer &buffer = call.stamps;
    const uint32_t writer = threadIdx.x / 32, first = (uint32_t(kernel) * buffer.blocks + blockIdx.x) * STAMP_WRITERS;
    const bool writes = buffer.headers != nullptr && blockIdx.x < buffer.blocks;
    if (threadIdx.x % 32 != 0 || writer >= STAMP_WRITERS) return;
    stamp_state &s = stamps();
    const uint64_t now = stamp_ns();
    s.count[writer] = 0, s.last_ns[writer] = uint32_t(now);
    if (writer == 0) {
        s.header = writes ? buffer.headers + first : nullptr;
        s.record = buffer.records + size_t(first) * buffer.capacity;
        s.capacity = buffer.capacity;
    }
    if (writes) buffer.headers[first + writer] = {now, stamp_clock(), 0};
}
// All threads of a block of a kernel that is not traced but shares code with those that are.
__device__ __forceinline__ void stamps_off() {
    if (threadIdx.x == 0) stamps().header = nullptr;
    __syncthreads();
}
// One thread of a warp at a time: what its warp has been doing since its last lap.
__device__ __forceinline__ void stamp_lap(stamp_kind kind, uint32_t detail) {
    stamp_state &s = stamps();
    const uint32_t writer = threadIdx.x / 32, now = uint32_t(stamp_ns());
    if (s.header == nullptr || writer >= STAMP_WRITERS) return;
    const uint32_t index = s.count[writer];
    if (index < s.capacity)
        s.record[size_t(writer) * s.capacity + index] = {s.last_ns[writer], now, stamp_clock(),
                                                         uint32_t(kind) << 24 | (detail & 0xffffffu)};
    s.header[writer].count = index + 1;
    s.count[writer] = index + 1;
    s.last_ns[writer] = now;
}
// Whole warps: lane 0 writes.
__device__ __forceinline__ void stamp_lap_warp(stamp_kind kind, uint32_t detail) {
    if (threadIdx.x % 32 == 0) stamp_lap(kind, detail);
    __syncwarp();
}
// Not inlined: beside the accumulators of e4m3 there are no registers for what a lap computes, and the main loop would spill.
inline __device__ __noinline__ void stamp_lap_called(stamp_kind kind, uint32_t detail) { stamp_lap(kind, detail); }
// Whole warpgroups: thread 0 writes.
__device__ __forceinline__ void stamp_lap_group(stamp_kind kind, uint32_t detail) {
    if (threadIdx.x % 128 == 0) stamp_lap_called(kind, detail);
    __syncwarp();
}
// Thread 0 of the block writes.
__device__ __forceinline__ void stamp_lap_block(stamp_kind kind, uint32_t detail = 0) {
    if (threadIdx.x == 0) stamp_lap(kind, detail);
    __syncwarp();
}
// Waits for a phase that the caller waits for next, so that the waiting is a lap of its own.
template <class Semaphore> __device__ __forceinline__ void stamp_arrival(stamp_kind kind, Semaphore &arrived, int phase, uint32_t detail) {
    wait(arrived, phase);
    stamp_lap(kind, detail);
}
template <class Semaphore>
__device__ __forceinline__ void stamp_arrival_group(stamp_kind kind, Semaphore &arrived, int phase, uint32_t detail) {
    wait(arrived, phase);
    stamp_lap_group(kind, detail);
}
// Whole warps: what was since the last lap belongs to no kind.
__device__ __forceinline__ void stamp_restart() {
    if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < STAMP_WRITERS) stamps().last_ns[threadIdx.x / 32] = uint32_t(stamp_ns());
    __syncwarp();
}

#else

constexpr int STAMP_SHARED_BYTES = 0;
__device__ __forceinline__ void stamps_off() {}
template <class Call> __device__ __forceinline__ void stamps_begin(const Call &, stamp_kernel) {}
__device__ __forceinline__ void stamp_lap(stamp_kind, uint32_t) {}
__device__ __forceinline__ void stamp_lap_warp(stamp_kind, uint32_t) {}
__device__ __forceinline__ void stamp_lap_group(stamp_kind, uint32_t) {}
__device__ __forceinline__ void stamp_lap_block(stamp_kind, uint32_t = 0) {}
template <class Semaphore> __device__ __forceinline__ void stamp_arrival(stamp_kind, Semaphore &, int, uint32_t) {}
template <class Semaphore> __device__ __forceinline__ void stamp_arrival_group(stamp_kind, Semaphore &, int, uint32_t) {}
__device__ __forceinline__ void stamp_restart() {}

#endif

}  // namespace moe_tk
