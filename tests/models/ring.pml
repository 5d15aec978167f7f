// The ring pool inside one rank: rows are placed into ring entries, computed, combined, and only then is the entry filled
// again, by a later generation or a later call. The memory between blocks is as weak as the one between ranks.
//
//@ holds three_generations -DROW_BLOCKS=6 -DROWS=1 -DCALLS=1
//@ holds two_calls -DROW_BLOCKS=4 -DROWS=1 -DCALLS=2
//@ holds two_rows_a_block -DROW_BLOCKS=3 -DROWS=2 -DCALLS=1
//@ refuted NO_WAIT assertion | an entry is filled without waiting
//@ refuted NO_GENERATION assertion -DROW_BLOCKS=6 -DROWS=1 -DCALLS=1 | "the entry was freed once" instead of "by the block one generation before"
//@ refuted WANT_FROZEN assertion | the count that frees an entry is not moved on with the call
//@ refuted FREED_BEFORE_READ assertion | combine frees the entry, then reads it
//@ refuted FREED_BY_GEMM assertion | the GEMM that wrote the entry frees it, not the combine that reads it
//@ refuted WAITS_FOR_ITSELF deadlock | place waits for the block that it is about to fill
//@ refuted RELAXED_ARRIVAL assertion | counting a placed row does not release it to the GEMM
//@ refuted RELAXED_DONE assertion | counting a finished tile does not release it to combine
//@ refuted COUNTED_BEFORE_PLACED assertion | the row is counted, then copied

#ifndef ROW_BLOCKS
#define ROW_BLOCKS 4
#define ROWS 1
#define CALLS 2
#endif
#define ENTRIES 2
#define PLACERS 2
#define COMPUTE 2  // index of the writing process
#define COMBINE 3
#define BLOCKS 4
#define COUNTERS (2 * ROW_BLOCKS)

#define GATHERED(entry, row) ((entry) * ROWS + (row))
#define EXPERT_OUT(entry) (ENTRIES * ROWS + (entry))
#define LOCS (ENTRIES * ROWS + ENTRIES)
#define LOCAL_LOCS (BIT(LOCS) - 1)
#define ARRIVED(b) (b)
#define DONE(b) (ROW_BLOCKS + (b))

#define ENTRY(b) ((b) % ENTRIES)
#define TAG(call, b) (((call) - 1) * ROW_BLOCKS + (b) + 1)  // what every row of block b holds in this call

#include "memory.pml"

byte place_item, compute_item, combine_item;  // role_lists
byte arrived[ROW_BLOCKS], done[ROW_BLOCKS], freed[ROW_BLOCKS];
byte want;        // arrived_want and freed_want of every block: rows of all calls so far
byte done_want;   // l2_want
byte freed_want;
byte launched, finished;

// patterns::launch: advance_wants, then the blocks, then join
proctype launch() {
    byte call = 1;
    do
    :: call <= CALLS ->
        d_step {
            want = want + ROWS;
            done_want++;
#ifdef WANT_FROZEN
            freed_want = ROWS;
#else
            freed_want = want;
#endif
            place_item = 0;
            compute_item = 0;
            combine_item = 0;
            finished = 0;
            launched = call
        };
        finished == PLACERS + 2;
        call++
    :: else -> break
    od
}

#if defined(NO_WAIT)
#define is_free(b) true
#elif defined(NO_GENERATION)
#define is_free(b) ((b) < ENTRIES || freed[ENTRY(b)] >= freed_want)
#elif defined(WAITS_FOR_ITSELF)
#define is_free(b) (freed[b] >= freed_want)
#else
#define is_free(b) ((b) < ENTRIES || freed[(b) - ENTRIES] >= freed_want)  // ring_pool::wait_free
#endif

inline count_arrival() {
    d_step {
#ifndef RELAXED_ARRIVAL
        give(me, ARRIVED(b));
        take(me, ARRIVED(b));
#endif
        arrived[b]++
    }
}

// roles::place_rows
proctype place(byte me) {
    byte call = 1, item, b;
    do
    :: call <= CALLS ->
        launched == call;
        do
        :: d_step { place_item < ROW_BLOCKS * ROWS -> item = place_item; b = item / ROWS; place_item++ };
            is_free(b);
#ifdef COUNTED_BEFORE_PLACED
            count_arrival();
            put(me, GATHERED(ENTRY(b), item % ROWS), TAG(call, b))
#else
            put(me, GATHERED(ENTRY(b), item % ROWS), TAG(call, b));
            count_arrival()
#endif
        :: d_step { place_item == ROW_BLOCKS * ROWS -> item = 0; b = 0 } -> break
        od;
        finished++;
        call++
    :: else -> break
    od
}

// roles::compute_tiles: counter_gate, the GEMM, count_push
proctype compute() {
    byte call = 1, b, row;
    do
    :: call <= CALLS ->
        launched == call;
        do
        :: compute_item < ROW_BLOCKS ->
            d_step { b = compute_item; compute_item++ };
            d_step { arrived[b] >= want && can_read(ARRIVED(b)) -> take(COMPUTE, ARRIVED(b)) };
            do
            :: row < ROWS -> assert(mem[GATHERED(ENTRY(b), row)] == TAG(call, b)); row++
            :: else -> row = 0; break
            od;
            put(COMPUTE, EXPERT_OUT(ENTRY(b)), TAG(call, b));
            d_step {
#ifndef RELAXED_DONE
                give(COMPUTE, DONE(b));
#endif
#ifdef FREED_BY_GEMM
                freed[b] = freed[b] + ROWS;
#endif
                done[b]++
            }
        :: else -> b = 0; break
        od;
        finished++;
        call++
    :: else -> break
    od
}

// roles::combine_jobs: one job per row
proctype combine() {
    byte call = 1, item, b;
    do
    :: call <= CALLS ->
        launched == call;
        do
        :: combine_item < ROW_BLOCKS * ROWS ->
            d_step { item = combine_item; b = item / ROWS; combine_item++ };
            d_step { done[b] >= done_want && can_read(DONE(b)) -> take(COMBINE, DONE(b)) };
#ifdef FREED_BEFORE_READ
            freed[b]++;
#endif
            assert(mem[EXPERT_OUT(ENTRY(b))] == TAG(call, b));
#if !defined(FREED_BEFORE_READ) && !defined(FREED_BY_GEMM)
            freed[b]++
#endif
        :: else -> item = 0; b = 0; break
        od;
        finished++;
        call++
    :: else -> break
    od
}

init { atomic { run launch(); run place(0); run place(1); run compute(); run combine() } }
