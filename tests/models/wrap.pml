// A slot that only some calls use, over more calls than the epoch can count: a word that was written half a turn ago or
// longer looks as if it were ahead. Any pattern of use is tried.
//
//@ holds refreshed | the owner brings its slots up to date every 2 calls, half a turn being 4
//@ holds wide -DWIDE | an epoch that never comes half a turn from an old value needs no care
//@ refuted NEVER_REFRESHED assertion | signed comparison alone: an old value is taken for this call's
//@ refuted REFRESHED_TOO_RARELY assertion | the owner waits a whole turn
//@ refuted REFRESHED_AFTER_POST deadlock | the owner overwrites a slot that may be written already

#define WRITER 0
#define OWNER 1
#define BLOCKS 2
#define COUNTERS 0
#define LOCAL_LOCS 0
#define LOCS 6

#define ROW 0
#define SLOT 1              // sent or combined, in the owner's memory
#define POSTED(r) (2 + (r)) // in the memory of rank r
#define DONE(r) (4 + (r))   // in the memory of rank r

#ifdef WIDE
#define RANGE 63
#else
#define RANGE 7
#endif
#define CALLS 10

#if defined(NEVER_REFRESHED) || defined(WIDE)
#define REFRESH(call) false
#elif defined(REFRESHED_TOO_RARELY)
#define REFRESH(call) ((call) % 8 == 0)
#else
#define REFRESH(call) ((call) % 2 == 0)
#endif

#define reached(seen, want) ((((seen) - (want)) & RANGE) < (RANGE + 1) / 2)

#include "memory.pml"

bool used;  // does this call write the slot; both ranks know it from the routing that was exchanged

// protocol::refresh_slots
#define refresh_slots \
    if \
    :: REFRESH(call) -> mem[SLOT] = (call - 1) & RANGE \
    :: else \
    fi

proctype writer() {
    byte call = 1;
    do
    :: call <= CALLS ->
        if
        :: used = true
        :: used = false
        fi;
        reached(mem[DONE(WRITER)], (call - 1) & RANGE);
        signal(WRITER, POSTED(OWNER), call & RANGE);
        reached(mem[POSTED(WRITER)], call & RANGE);
        if
        :: used ->
            put(WRITER, ROW, call);
            signal(WRITER, SLOT, call & RANGE)
        :: else
        fi;
        signal(WRITER, DONE(OWNER), call & RANGE);
        reached(mem[DONE(WRITER)], call & RANGE);  // so that `used` belongs to one call
        call++
    :: else -> break
    od
}

proctype owner() {
    byte call = 1;
    do
    :: call <= CALLS ->
        reached(mem[DONE(OWNER)], (call - 1) & RANGE);
#ifndef REFRESHED_AFTER_POST
        refresh_slots;
#endif
        signal(OWNER, POSTED(WRITER), call & RANGE);
#ifdef REFRESHED_AFTER_POST
        refresh_slots;
#endif
        reached(mem[POSTED(OWNER)], call & RANGE);
        if
        :: used ->
            reached(mem[SLOT], call & RANGE);
            assert(mem[ROW] == call)
        :: else
        fi;
        signal(OWNER, DONE(WRITER), call & RANGE);
        call++
    :: else -> break
    od
}

init { atomic { run writer(); run owner() } }
