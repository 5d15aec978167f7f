// What ranks tell each other when something goes wrong: one control block at the start of every rank's heap.
//
// abort_flag   stored (never read-modify-written) by anybody: this rank's blocks and host, peers.
// lost_ranks   written by this rank's host (liveness watch) only. A lost rank ends the waits for it and no others: it may
//              have died after its part was done.
// progress[p]  written by rank p only: moves whenever rank p finishes an item, so that slow ranks are told from stuck ones.
// records[p]   written by rank p only: what rank p waited for when it gave up, or that it was at work when it was told to.
#pragma once

#include <cstdint>

namespace moe_tk::protocol {

constexpr int MAX_RANKS = 64;  // contributors are bits of one 64-bit word

enum class op_id : uint32_t { none, moe_layer, ag_gemm, gemm_rs, dispatch_gemm, gemm_combine, mega_moe };
enum class phase_id : uint32_t { none, barrier, exchange, dispatch, gemm1, gemm2, combine, reduce };
enum class role_id : uint32_t { host, send, place, compute, combine, reduce };
enum class abort_kind : uint32_t { none, timeout, peer_lost, told_by_peer, host };  // host: an exception in Python

// Who waits where: filled by the role, completed by the wait.
struct wait_site {
    op_id op = op_id::none;
    phase_id phase = phase_id::none;
    role_id role = role_id::host;
    int32_t rank = -1;
    int32_t block = -1;     // thread block of the launch
    int32_t slot = -1;      // row block, chunk, job: the index the role waits on
    int32_t producer = -1;  // rank whose progress would end the wait (own rank for local waits)
};

struct wait_record {
    wait_site site;
    uint32_t expected = 0;
    uint32_t seen = 0;
    uint32_t kind = 0;  // abort_kind; 0 = no record. Stored last: it publishes the record
    uint32_t epoch = 0;
    uint64_t waited_ns = 0;
    uint64_t missing = 0;  // bit p: rank p had not come
};
static_assert(sizeof(wait_record) == 64, "one cache line, so that a record is moved as a whole");

struct control_block {
    alignas(64) uint32_t abort_flag;  // abort_kind; 0 = nobody gave up
    alignas(64) uint64_t lost_ranks;  // bit p: the process of rank p is gone
    alignas(64) uint32_t progress[MAX_RANKS];
    alignas(64) wait_record records[MAX_RANKS];
};
static_assert(sizeof(control_block) == 4480, "moe_tk.memory.layout.CONTROL_BYTES says the same");

}  // namespace moe_tk::protocol
