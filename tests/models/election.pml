// Local election and chunk watermark: blocks of one rank combine the jobs of two chunks, the last of a chunk publishes its
// watermark at the source rank, whose reduce reads the planes. Several calls over the same planes and counters.
//
//@ holds three_blocks -DWORKERS=3 -DCALLS=1
//@ holds three_calls -DWORKERS=2 -DCALLS=3
//@ holds nvlink_counter -DREMOTE_COUNTER -DWORKERS=2 -DCALLS=2 | no election: every job adds to a remote counter, over a link that loses nothing
//@ refuted ELECTED_TOO_EARLY assertion | the last but one publishes
//@ refuted RELAXED_ELECTION assertion | the addition does not release and acquire: the elected one speaks for itself only
//@ refuted RELAXED_SIGNAL assertion | the system fence between the planes and the watermark is dropped | KRN-05
//@ refuted COUNTED_FIRST assertion | a job is counted before its partial row is written
//@ refuted NO_ELECTION assertion | every job publishes the watermark
//@ refuted WANT_FROZEN deadlock | the wanted count is not moved on with the call | GRF-01
//@ refuted PCIE_COUNTER deadlock -DREMOTE_COUNTER | remote additions over PCIe lose increments | KRN-06

#ifndef WORKERS
#define WORKERS 2
#define CALLS 2
#endif
#define REDUCE WORKERS
#define BLOCKS (WORKERS + 1)
#define COUNTERS 2
#define LOCAL_LOCS 0
#define JOBS 4
#define CHUNKS 2

#define PLANE(j) (j)           // in the source rank's memory: planes, the row of job j
#define DONE 4                 // in this rank's memory: done, of the source rank
#ifdef REMOTE_COUNTER
#define LOCS (5 + WORKERS)
#define TALLY(b) (5 + (b))     // in the source rank's memory: what the additions of block b amount to
#else
#define LOCS 7
#define WATERMARK(c) (5 + (c)) // in the source rank's memory: combined, chunk c
#endif

#define CHUNK_OF(j) ((j) / 3)
#define EXPECTED(c) ((c) == 0 -> 3 : 1)

#include "memory.pml"

byte next_item;          // protocol::dispenser of the launch
byte job_done[CHUNKS];   // local_counters::job_done, job_want
byte job_want[CHUNKS];
byte launched;           // the call whose blocks run
byte finished;           // blocks of this launch that came to the end of the list
#ifdef REMOTE_COUNTER
byte added[WORKERS];     // what block b has added to the remote counter over all calls
#endif

// patterns::launch on the rank that owns the experts
proctype launch() {
    byte call = 1, c;
    do
    :: call <= CALLS ->
        mem[DONE] >= call - 1;
        d_step {
#ifdef WANT_FROZEN
            if
            :: call == 1 -> job_want[0] = EXPECTED(0); job_want[1] = EXPECTED(1)
            :: else
            fi;
#else
            job_want[0] = job_want[0] + EXPECTED(0);
            job_want[1] = job_want[1] + EXPECTED(1);
#endif
            next_item = 0;
            finished = 0;
            launched = call
        };
        finished == WORKERS;
        call++
    :: else -> break
    od
}

inline elect_and_publish() {
    d_step {
#ifndef RELAXED_ELECTION
        give(b, CHUNK_OF(job));
        take(b, CHUNK_OF(job));
#endif
        job_done[CHUNK_OF(job)]++;
#if defined(ELECTED_TOO_EARLY)
        elected = job_done[CHUNK_OF(job)] == job_want[CHUNK_OF(job)] - (CHUNK_OF(job) == 0 -> 1 : 0)
#elif defined(NO_ELECTION)
        elected = true
#else
        elected = job_done[CHUNK_OF(job)] == job_want[CHUNK_OF(job)]
#endif
    };
    if
    :: elected ->
#ifdef RELAXED_SIGNAL
        put(b, WATERMARK(CHUNK_OF(job)), call)
#else
        signal(b, WATERMARK(CHUNK_OF(job)), call)
#endif
    :: else
    fi;
    elected = false
}

// red.release.sys on a counter in the source rank's memory; the sum of the blocks' tallies is its value
inline add_remotely() {
#ifdef REMOTE_COUNTER
    if
    :: added[b]++
#ifdef PCIE_COUNTER
    :: skip  // the increment is lost
#endif
    fi;
    signal(b, TALLY(b), added[b])
#endif
}

// roles::combine_jobs
proctype block(byte b) {
    byte call = 1, job;
    bool elected;
    do
    :: call <= CALLS ->
        launched == call;
        do
        :: d_step { next_item < JOBS -> job = next_item; next_item++ };
#ifdef COUNTED_FIRST
            elect_and_publish();
            put(b, PLANE(job), call)
#else
            put(b, PLANE(job), call);
#ifdef REMOTE_COUNTER
            add_remotely()
#else
            elect_and_publish()
#endif
#endif
        :: d_step { next_item == JOBS -> job = 0 } -> break
        od;
        finished++;
        call++
    :: else -> break
    od
}

// roles::reduce_rows on the source rank
proctype reduce() {
    byte call = 1;
    do
    :: call <= CALLS ->
#ifdef REMOTE_COUNTER
        mem[TALLY(0)] + mem[TALLY(1)] >= call * JOBS;
#else
        mem[WATERMARK(0)] >= call;
        assert(mem[PLANE(0)] == call && mem[PLANE(1)] == call && mem[PLANE(2)] == call);
        mem[WATERMARK(1)] >= call;
#endif
        assert(mem[PLANE(0)] == call && mem[PLANE(1)] == call && mem[PLANE(2)] == call && mem[PLANE(3)] == call);
        signal(REDUCE, DONE, call);
        call++
    :: else -> break
    od
}

init {
    atomic {
        run launch();
        run block(0);
        run block(1);
#if WORKERS > 2
        run block(2);
#endif
        run reduce()
    }
}
