// Calls of the CUDA back end over NVLink: two ranks, three launches per call on one stream, no barrier between calls. Receivers
// read rows where their owner has exported them (remote loads are coherent here); routing lies in two buffers by the parity of
// the call. Which ranks want rows of which differs from call to call.
//
//@ holds two_calls -DCALLS=2
//@ holds three_calls -DCALLS=3 -DONE_SIDED | tokens of rank 0 go to rank 1, none come back
//@ holds a_wait_fails -DCALLS=2 -DFAULT | a rank gives up: the other must not get what it computes on whatever data there is
//@ refuted ONE_ROUTING_BUFFER assertion | routing of the next call overwrites that which is being read
//@ refuted READS_WITHOUT_RETURN assertion | a rank that reads rows but owes nothing for them: the owner may export the next ones
//@ refuted RELAXED_ROWS assertion | the exported rows are not released by the flag that announces them
//@ refuted EXPORTS_EARLY assertion | the rows of the next call are exported before this call is over
//@ refuted PUBLISHES_AFTER_ABORT assertion -DCALLS=2 -DFAULT | after a wait was given up the launches go on and send partial rows as if they were good | KRN-11
//@ refuted KEEPS_QUIET deadlock -DCALLS=2 -DFAULT | a rank that gives up neither publishes nor raises the abort flag

#ifndef CALLS
#define CALLS 2
#endif
#define BLOCKS 4
#define COUNTERS 0
#define LOCAL_LOCS 0

#define OTHER (1 - r)
#define COPIER(r) (2 + (r))        // index of the writing process
#ifdef ONE_ROUTING_BUFFER
#define ROUTING(to, call) ((to) * 2)
#else
#define ROUTING(to, call) ((to) * 2 + (call) % 2)  // in the memory of rank `to`, written by the other; likewise below
#endif
#define POSTED(to) (4 + (to))
#define ROWS_POSTED(to) (6 + (to))
#define PLANE(to) (8 + (to))
#define COMBINED(to) (10 + (to))
#define ROWS(r) (12 + (r))         // in the memory of rank r, written by it, read by the other
#ifdef FAULT
#define ABORT(to) (14 + (to))
#define LOCS 16
#define told (mem[ABORT(r)] != 0)
#else
#define LOCS 14
#define told false
#endif
#define WANTED 8                   // added to the routing: the sender's tokens go to the receiver's experts
#define GARBAGE 255
#define STOP 255

#include "memory.pml"

byte exporting[2], exported[2];    // call whose rows the copying blocks of open_call move
#ifdef FAULT
bool may_fail;                     // once, or not at all
#endif

// nvlink::export_rows
proctype copier(bit r) {
    byte call = 1;
    do
    :: call <= CALLS && exporting[r] >= call && exporting[r] != STOP ->
        put(COPIER(r), ROWS(r), call);
#ifdef RELAXED_ROWS
        put(COPIER(r), ROWS_POSTED(OTHER), call);
#else
        signal(COPIER(r), ROWS_POSTED(OTHER), call);
#endif
        exported[r] = call;
        call++
    :: call > CALLS || exporting[r] == STOP -> break
    od
}

// nvlink::give_up
inline give_up() {
#ifdef FAULT
#ifndef KEEPS_QUIET
    signal(r, ABORT(OTHER), 1);
#endif
    failed = true
#endif
}

// nvlink::spin_until; after a failure no wait lasts
inline wait_for(word) {
    if
    :: word || failed
#ifdef FAULT
    :: !(word) && !failed && told -> give_up()
    :: d_step { !(word) && !failed && may_fail -> may_fail = false }; give_up()
#endif
    fi
}

proctype rank(bit r) {
    byte call = 1, value;
    bool mine, theirs;  // my tokens go there, theirs come here
    bool failed, good;
    do
    :: call <= CALLS ->
        // open_call
        exporting[r] = call;
#if defined(FAULT)
        mine = r == 0;
#elif defined(ONE_SIDED)
        if
        :: r == 0 -> mine = true
        :: mine = false
        fi;
#else
        if
        :: mine = true
        :: mine = false
        fi;
#endif
        put(r, ROUTING(OTHER, call), call + mine * WANTED);
        signal(r, POSTED(OTHER), call);
        wait_for(mem[POSTED(r)] >= call);
        if
        :: !failed ->
            assert(mem[ROUTING(r, call)] == call || mem[ROUTING(r, call)] == call + WANTED);
            theirs = mem[ROUTING(r, call)] >= WANTED
        :: failed -> theirs = mine  // whatever
        fi;
        exported[r] == call;
#ifdef EXPORTS_EARLY
        exporting[r] = call + 1;
#endif
        // gather_gemm: the movers, then tiles
        value = GARBAGE;
        if
        :: theirs ->
            wait_for(mem[ROWS_POSTED(r)] >= call);
            if
            :: !failed -> value = mem[ROWS(OTHER)]; assert(value == call)
            :: failed
            fi
        :: !theirs
        fi;
        // gemm_scatter: jobs, then own tokens
#ifdef PUBLISHES_AFTER_ABORT
        good = true;
#else
        good = !failed;
#endif
        if
#ifdef READS_WITHOUT_RETURN
        :: true
#else
        :: theirs && good ->
            put(r, PLANE(OTHER), value);
            signal(r, COMBINED(OTHER), call)
        :: !theirs || !good
#endif
        fi;
        if
#ifdef READS_WITHOUT_RETURN
        :: true
#else
        :: mine ->
            wait_for(mem[COMBINED(r)] >= call);
            if
            :: !failed -> assert(mem[PLANE(r)] == call)  // the result; else NaN
            :: failed
            fi
        :: !mine
#endif
        fi;
        d_step { value = 0; good = false; mine = false; theirs = false; call++ };
        if
        :: failed -> exporting[r] = STOP; break  // the host refuses further calls
        :: !failed
        fi
    :: call > CALLS -> break
    od
}

init {
#ifdef FAULT
    if
    :: may_fail = true
    :: skip
    fi;
#endif
    atomic { run rank(0); run rank(1); run copier(0); run copier(1) }
}
