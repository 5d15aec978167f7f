// The single-writer slot with epochs: two ranks send rows to a third in several calls, across the wrap of the epoch.
//
//@ holds three_calls
//@ refuted RELAXED_SIGNAL assertion | the system fence (release) between rows and slot is dropped | KRN-05
//@ refuted SIGNAL_FIRST assertion | the slot is written before the rows | KRN-05
//@ refuted RELAXED_POLL assertion | the receiver's load of the slot does not acquire: rows are read early
//@ refuted EPOCH_FROZEN assertion | the epoch is a launch argument that a graph replays unchanged | GRF-01
//@ refuted PLAIN_COMPARE assertion | seen >= want without regard to the wrap
//@ refuted CLEARED_SLOT deadlock | a flag that the receiver clears instead of an epoch that only grows | GRF-02
//@ refuted SHARED_SLOT assertion | two ranks write one slot
//@ refuted PCIE_REMOTE_POLL deadlock | the receiver polls the writer's memory over PCIe: stale values for ever | KRN-06
//@ refuted PCIE_PULL assertion | the receiver reads the rows in the writer's memory over PCIe: values of an earlier call | KRN-06

#define SENDERS 2
#define RECEIVER SENDERS
#define BLOCKS 3
#define COUNTERS 0
#define LOCAL_LOCS 0
#define LOCS 8

#define ROW(s, i) ((s) * 2 + (i))  // in the receiver's memory: arrivals, row i of rank s
#ifdef SHARED_SLOT
#define SLOT(s) 4
#else
#define SLOT(s) (4 + (s))          // in the receiver's memory: sent, of rank s
#endif
#define DONE(s) (6 + (s))          // in the memory of rank s: done, of the receiver

#define CALLS 3
#define FIRST 7                    // epochs 7, 0, 1: 3 bits, so that they wrap
#define RANGE 7

#ifdef PLAIN_COMPARE
#define reached(seen, want) ((seen) >= (want))
#else
#define reached(seen, want) ((((seen) - (want)) & RANGE) < 4)
#endif

#ifdef EPOCH_FROZEN
#define EPOCH(call) FIRST
#else
#define EPOCH(call) ((FIRST + (call)) & RANGE)
#endif
#define TRUE_EPOCH(call) ((FIRST + (call)) & RANGE)

#include "memory.pml"

// hooks::push_rows::send after protocol::wait_for_previous_call
proctype sender(byte s) {
    byte call;
    do
    :: call < CALLS ->
        reached(mem[DONE(s)], (EPOCH(call) - 1) & RANGE);
#ifdef SIGNAL_FIRST
        signal(s, SLOT(s), EPOCH(call));
        put(s, ROW(s, 0), TRUE_EPOCH(call));
        put(s, ROW(s, 1), TRUE_EPOCH(call));
#else
        put(s, ROW(s, 0), TRUE_EPOCH(call));
        put(s, ROW(s, 1), TRUE_EPOCH(call));
#if defined(RELAXED_SIGNAL)
        put(s, SLOT(s), EPOCH(call));
#elif defined(CLEARED_SLOT)
        signal(s, SLOT(s), 1);
#else
        signal(s, SLOT(s), EPOCH(call));
#endif
#endif
        call++
    :: else -> break
    od
}

#ifdef PCIE_REMOTE_POLL
byte cached[SENDERS] = (FIRST - 1);  // what remote loads of the slots return, whatever is there by now
#define SEEN(s) cached[s]
#else
#define SEEN(s) mem[SLOT(s)]
#endif

#ifdef PCIE_PULL
byte loaded[4];  // what a remote load of a row returned last; a later one may return it again
inline read_row(s, i) {
    if
    :: true -> loaded[ROW(s, i)] = mem[ROW(s, i)]
    :: loaded[ROW(s, i)] != 0 -> skip
    fi;
    assert(loaded[ROW(s, i)] == TRUE_EPOCH(call))
}
#else
#define read_row(s, i) assert(mem[ROW(s, i)] == TRUE_EPOCH(call))
#endif

#ifdef CLEARED_SLOT
#define come(s) (mem[SLOT(s)] == 1)
#else
#define come(s) reached(SEEN(s), EPOCH(call))
#endif

// hooks::push_rows::locate, then protocol::arrive
proctype receiver() {
    byte call, from, early;
    do
    :: call < CALLS ->
        from = 0;
        do
        :: from < SENDERS ->
#ifdef RELAXED_POLL
            early = mem[ROW(from, 0)];
            come(from);
            assert(early == TRUE_EPOCH(call));
#else
            come(from);
            read_row(from, 0);
#endif
            read_row(from, 1);
            from++
        :: else -> break
        od;
        signal(RECEIVER, DONE(0), EPOCH(call));
        signal(RECEIVER, DONE(1), EPOCH(call));
#ifdef CLEARED_SLOT
        mem[SLOT(0)] = 0;
        mem[SLOT(1)] = 0;
#endif
        call++
    :: else -> break
    od
}

init {
    d_step {
        idx_ = 0;
        do
        :: idx_ < LOCS -> mem[idx_] = FIRST - 1; idx_++
        :: else -> idx_ = 0; break
        od
    }
    atomic { run sender(0); run sender(1); run receiver() }
}
