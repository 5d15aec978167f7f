// Gate and push over counters of one GPU: a row block may start when enough of its rows have arrived; a finished tile adds
// one to the counter of its row block. Counters grow from call to call and are never reset.
#pragma once

#include "../engine/tile_task.cuh"

namespace moe_tk {

// What a bounded wait leaves when its time is over; the first one stays.
struct wait_record {
    uint32_t timed_out;  // 0: none
    uint32_t block, row_block, seen, want;
};

// ORDER rows_ready: acquires what the writer of the rows released (gpu scope), then lets this thread's TMA loads see it.
struct counter_gate {
    static constexpr bool NOOP = false;
    struct params {
        const uint32_t *arrived;  // (row blocks,)
        const uint32_t *want;     // (row blocks,)
        uint64_t timeout_ns;
        wait_record *record;
    };
    // Whether the rows are there; nothing is waited for.
    __device__ static bool ready(const params &p, const tile_task &t) {
        const uint32_t seen = kittens::load_acquire_gpu(p.arrived + t.row_block);
        if (int(seen - __ldg(p.want + t.row_block)) < 0) return false;
        kittens::fence_proxy_async_global();
        return true;
    }
    __device__ static void wait(const params &p, const tile_task &t) {
        const uint32_t want = __ldg(p.want + t.row_block);
        uint32_t seen = kittens::load_acquire_gpu(p.arrived + t.row_block);
        if (int(seen - want) < 0) {
            const uint64_t start = kittens::global_timer_ns();
            while (int(seen - want) < 0) {
                // An abort is seen by every later wait: the kernel ends with wrong numbers and a record that says so.
                if (kittens::load_acquire_gpu(&p.record->timed_out) != 0) break;
                if (kittens::global_timer_ns() - start > p.timeout_ns) {
                    report(p, t, seen, want);
                    break;
                }
                seen = kittens::load_acquire_gpu(p.arrived + t.row_block);
            }
        }
        kittens::fence_proxy_async_global();
    }

  private:
    __device__ static void report(const params &p, const tile_task &t, uint32_t seen, uint32_t want) {
        if (atomicCAS(&p.record->timed_out, 0u, 1u) != 0) return;
        p.record->block = blockIdx.x, p.record->row_block = uint32_t(t.row_block);
        p.record->seen = seen, p.record->want = want;
    }
};

// ORDER tile_done: releases the tile (its TMA stores are complete) to whoever acquires the counter.
struct counter_push {
    static constexpr bool NOOP = false;
    struct params {
        uint32_t *finished;  // (row blocks,) grows by the number of column blocks
    };
    __device__ static void publish(const params &p, const tile_task &t) {
        kittens::fence_proxy_async();
        kittens::add_release_gpu(p.finished + t.row_block, 1);
    }
};

}  // namespace moe_tk
