// Every protocol function in a kernel, for each wire: it must compile for each architecture without spilling registers.
// The same file compiles as C++ for the host. Nothing here is run.
#include "tk_kernels/protocol/abort.hpp"
#include "tk_kernels/protocol/barrier.hpp"
#include "tk_kernels/protocol/dispenser.hpp"
#include "tk_kernels/protocol/election.hpp"
#include "tk_kernels/protocol/epoch.hpp"
#include "tk_kernels/protocol/exchange.hpp"
#include "tk_kernels/protocol/heap.hpp"
#include "tk_kernels/protocol/ready.hpp"
#include "tk_kernels/protocol/ring.hpp"
#include "tk_kernels/protocol/wait.hpp"
#include "tk_kernels/protocol/watermark.hpp"
#include "tk_kernels/protocol/wire.hpp"

using namespace moe_tk;
using namespace moe_tk::protocol;

#if defined(__CUDACC__)
#define KERNEL __global__ __launch_bounds__(128, 1)
#define FROZEN const __grid_constant__
#else
#define KERNEL
#define FROZEN const
#endif

struct launch {
    symmetric_heap heap;
    wait_context wait;
    ring_pool ring;
    dispenser *items;
    uint32_t *counters, *wants;
    const char *rows;
    int64_t row_bytes;
    uint32_t num_items;
    bool *ok;
};

template <class Wire>
KERNEL void open_call(FROZEN launch g, FROZEN call_header header, FROZEN routing_view routing) {
    *g.ok = exchange_headers<Wire>(g.heap, header, routing, g.wait, {op_id::moe_layer, phase_id::exchange, role_id::host});
}

template <class Wire>
KERNEL void close_call(FROZEN launch g) { arrive<Wire>(g.heap, call_epoch(g.wait)); }

// Send: takes rows, puts them to a peer, announces each.
template <class Wire>
KERNEL void send(FROZEN launch g, int to) {
    for (uint32_t item = g.items->take(); item < g.num_items; item = g.items->take()) {
        Wire::put(g.heap.arrivals<char>(to, g.heap.rank, item, g.row_bytes), g.rows + item * g.row_bytes, g.row_bytes);
        Wire::signal(g.heap.sent(to, g.heap.rank, item), call_epoch(g.wait));
        note_progress(g.wait);
    }
}

// Place: waits for arrived rows, copies them into ring entries, counts them.
template <class Wire>
KERNEL void place(FROZEN launch g, char *gathered, int from) {
    wait_site site{op_id::moe_layer, phase_id::dispatch, role_id::place, g.heap.rank, 0, 0, from};
    for (uint32_t item = g.items->take(); item < g.num_items; item = g.items->take()) {
        site.slot = int32_t(item);
        if (!spin_until(g.heap.sent(g.heap.rank, from, item), call_epoch(g.wait), g.wait, site)) return;
        if (!g.ring.wait_free(item, g.wait, site)) return;
        platform::copy_bytes(gathered + g.ring.entry(item) * g.row_bytes,
                             g.heap.arrivals<char>(g.heap.rank, from, item, g.row_bytes), g.row_bytes, 0, 1);
        count_ready(g.counters + item, 1);
    }
}

// Combine: waits for its tiles, sends the partial row home, publishes; then waits for what the others owe.
template <class Wire>
KERNEL void combine(FROZEN launch g, int source, int64_t chunk) {
    wait_site site{op_id::moe_layer, phase_id::combine, role_id::combine, g.heap.rank, 0, 0, g.heap.rank};
    if (!wait_ready(g.counters, g.wants[0], g.wait, site)) return;
    Wire::put(g.heap.planes<char>(source, g.heap.rank, chunk, g.row_bytes), g.rows, g.row_bytes);
    g.ring.free_row(chunk);
    publish_job<Wire>(g.heap, source, chunk, g.counters + 1, g.wants[1], call_epoch(g.wait));
    *g.ok = wait_chunk<Wire>(g.heap, source, chunk, g.num_items, g.wants, g.wait, site) && !aborted(g.wait);
}

KERNEL void report(FROZEN launch g, wait_record *copy) {
    give_up(g.wait, {}, 1, 0, 0, lost_ranks(g.wait), abort_kind::host);
    *g.ok = read_record(g.wait.own, 0, *copy) && elect_last(g.counters, 1, g.wants[0]);
    close_record(g.wait, op_id::moe_layer);
}

#define EACH_WIRE(WIRE)                                                                          \
    template KERNEL void open_call<WIRE>(FROZEN launch, FROZEN call_header, FROZEN routing_view); \
    template KERNEL void close_call<WIRE>(FROZEN launch);                                        \
    template KERNEL void send<WIRE>(FROZEN launch, int);                                         \
    template KERNEL void place<WIRE>(FROZEN launch, char *, int);                                \
    template KERNEL void combine<WIRE>(FROZEN launch, int, int64_t);
EACH_WIRE(shm_wire)
EACH_WIRE(pcie_wire)
EACH_WIRE(nvlink_wire)
