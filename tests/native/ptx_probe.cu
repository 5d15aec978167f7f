// Kernels whose PTX test_ptx.py reads: one primitive each, then the protocols with rank 0 of 2 as constants, so that every
// address in the PTX comes either from this rank's memory or from the peer's.
#include "tk_kernels/protocol/exchange.hpp"
#include "tk_kernels/protocol/ready.hpp"
#include "tk_kernels/protocol/watermark.hpp"
#include "tk_kernels/protocol/wire.hpp"

using namespace moe_tk;
using namespace moe_tk::protocol;

#define PROBE(NAME, ...) \
    extern "C" __global__ void NAME(uint32_t *word32, uint64_t *word64, uint32_t *out32, uint64_t *out64, uint32_t value32, uint64_t value64) { __VA_ARGS__ }
#define PROBE_WIDTH(SCOPE, BITS)                                                                                            \
    PROBE(load_acquire_##SCOPE##_##BITS, *out##BITS = platform::load_acquire<scope::SCOPE>(word##BITS);)                    \
    PROBE(load_relaxed_##SCOPE##_##BITS, *out##BITS = platform::load_relaxed<scope::SCOPE>(word##BITS);)                    \
    PROBE(store_release_##SCOPE##_##BITS, platform::store_release<scope::SCOPE>(word##BITS, value##BITS);)                  \
    PROBE(store_relaxed_##SCOPE##_##BITS, platform::store_relaxed<scope::SCOPE>(word##BITS, value##BITS);)                  \
    PROBE(fetch_add_acq_rel_##SCOPE##_##BITS, *out##BITS = platform::fetch_add_acq_rel<scope::SCOPE>(word##BITS, value##BITS);) \
    PROBE(exchange_acq_rel_##SCOPE##_##BITS, *out##BITS = platform::exchange_acq_rel<scope::SCOPE>(word##BITS, value##BITS);)   \
    PROBE(red_release_##SCOPE##_##BITS, platform::red_release<scope::SCOPE>(word##BITS, value##BITS);)
#define PROBE_SCOPE(SCOPE)  \
    PROBE_WIDTH(SCOPE, 32)  \
    PROBE_WIDTH(SCOPE, 64)  \
    PROBE(fence_##SCOPE, *out32 = value32; platform::fence<scope::SCOPE>(); *out64 = value64;)
PROBE_SCOPE(block)
PROBE_SCOPE(device)
PROBE_SCOPE(system)
PROBE(fence_proxy_async, *out32 = value32; platform::fence_proxy_async(); *out64 = value64;)
PROBE(nap, platform::nap_ns(value32);)
PROBE(wall_clock, *out64 = platform::now_ns();)

// The compiler must not move plain accesses across the primitives, nor merge those on both sides.
PROBE(release_after_stores, *out32 = value32; platform::store_release<scope::system>(word32, 1u); *out32 = value32 + 1;)
PROBE(acquire_before_loads, const uint32_t before = *out32; const uint32_t flag = platform::load_acquire<scope::system>(word32);
      *out64 = before + flag + *out32;)

// Rows that TMA reads later: stores, proxy fence, counter; wait, proxy fence, loads.
PROBE(row_written, *out32 = value32; count_ready(word32, 1);)
extern "C" __global__ void row_awaited(const __grid_constant__ wait_context wait, const uint32_t *counter, uint32_t *out) {
    if (wait_ready(counter, 7, wait, {})) *out = 1;
}

// One call of rank 0 of 2. base[1] and peers[1] are the only addresses of the peer.
template <class Wire>
__device__ __forceinline__ void one_call(const symmetric_heap &frozen, const wait_context &frozen_wait, const call_header &header,
                                         const char *rows, uint32_t *counters, int64_t bytes) {
    symmetric_heap heap;
    heap.base[0] = frozen.base[0], heap.base[1] = frozen.base[1];
    heap.offset = frozen.offset;
    heap.world = 2, heap.rank = 0;
    heap.max_tokens = frozen.max_tokens, heap.send_chunks = frozen.send_chunks, heap.job_chunks = frozen.job_chunks;
    wait_context wait;
    wait.own = frozen_wait.own;
    wait.peers[1] = frozen_wait.peers[1];
    wait.world = 2, wait.rank = 0;
    wait.timeout_ns = frozen_wait.timeout_ns, wait.epoch_word = frozen_wait.epoch_word;
    wait.record_claim = frozen_wait.record_claim, wait.progress = frozen_wait.progress, wait.last_forward_ns = frozen_wait.last_forward_ns;
    if (!exchange_headers<Wire>(heap, header, {}, wait, {})) return;
    Wire::put(heap.arrivals<char>(1, 0, 0, bytes), rows, bytes);
    Wire::signal(heap.sent(1, 0, 3), call_epoch(wait));
    if (!spin_until(heap.sent(0, 1, 3), call_epoch(wait), wait, {.producer = 1})) return;
    Wire::put(heap.planes<char>(1, 0, 0, bytes), rows, bytes);
    publish_job<Wire>(heap, 1, 0, counters, 5, call_epoch(wait));
    if (!wait_chunk<Wire>(heap, 1, 0, 5, counters + 1, wait, {})) return;
    note_progress(wait);
    arrive<Wire>(heap, call_epoch(wait));
}

// Data, then the slot that announces it; a job, then the election that speaks for several.
#define SIGNAL_PROBES(NAME, WIRE)                                                                                               \
    extern "C" __global__ void NAME##_signal(uint4 *rows, uint32_t *slot, uint4 row, uint32_t epoch) {                          \
        *rows = row;                                                                                                            \
        WIRE::signal(slot, epoch);                                                                                              \
    }                                                                                                                           \
    extern "C" __global__ void NAME##_publish(const __grid_constant__ symmetric_heap heap, uint32_t *done, uint32_t epoch) {    \
        publish_job<WIRE>(heap, 1, 0, done, 5, epoch);                                                                          \
    }
SIGNAL_PROBES(shm, shm_wire)
SIGNAL_PROBES(pcie, pcie_wire)
SIGNAL_PROBES(nvlink, nvlink_wire)

#define CALL_PROBE(NAME, WIRE)                                                                                                  \
    extern "C" __global__ void NAME(const __grid_constant__ symmetric_heap heap, const __grid_constant__ wait_context wait,     \
                                    const __grid_constant__ call_header header, const char *rows, uint32_t *counters, int64_t bytes) { \
        one_call<WIRE>(heap, wait, header, rows, counters, bytes);                                                              \
    }
CALL_PROBE(call_shm, shm_wire)
CALL_PROBE(call_pcie, pcie_wire)
CALL_PROBE(call_nvlink, nvlink_wire)

// What the checker must find: a wait that polls the peer, and a counter at the peer.
extern "C" __global__ void bad_poll(const __grid_constant__ symmetric_heap heap, const __grid_constant__ wait_context wait) {
    spin_until(reinterpret_cast<const uint32_t *>(heap.base[1]), 7, wait, {});
}
extern "C" __global__ void bad_count(const __grid_constant__ symmetric_heap heap) {
    platform::fetch_add_acq_rel<scope::system>(reinterpret_cast<uint32_t *>(heap.base[1]), 1u);
}
