// Calls of the CUDA back end over NVLink: two ranks, launches on one stream, no barrier between calls. Owners write rows into the
// receivers' arrival buffers at the start of a call, before they have heard from them in it; GEMM 1 reads them there, tile after
// tile. Routing lies in two buffers by the parity of the call. Which ranks want rows of which differs from call to call, and a
// call may be refused.
//
//@ holds two_calls -DCALLS=2
//@ holds three_calls -DCALLS=3 -DONE_SIDED | tokens of rank 0 go to rank 1, none come back
//@ holds refusals -DCALLS=3 -DREFUSALS | either rank refuses one call or none: rows have been sent, and nobody reads them
//@ holds dispatch_gemm -DCALLS=3 -DREFUSALS -DDISPATCH | no call owes partial rows, or some do: rows wait for the headers
//@ holds a_wait_fails -DCALLS=2 -DFAULT | a rank gives up: the other must not get what it computes on whatever data there is
//@ holds dispatch_gemm_fails -DCALLS=2 -DFAULT -DDISPATCH | the wait that may be given up is also that of the rows for the headers
//@ refuted ONE_ROUTING_BUFFER assertion | routing of the next call overwrites that which is being read
//@ refuted NO_EXPORT_WAIT assertion -DONE_SIDED -DDISPATCH | rows of a call that follows dispatch_gemm do not wait for the headers: one is overwritten before it is read
//@ refuted PUBLISHED_BEFORE_READ assertion | a rank says that its partial row is there before GEMM 1 has read the row for the last time: the owner may send the next one
//@ refuted NO_ROWS_WAIT assertion | loaders begin as soon as the tables are there and do not wait until the rows are
//@ refuted RELAXED_ROWS assertion | the rows are not released by the flag that announces them
//@ refuted EXPORTS_EARLY assertion | the rows of the next call are sent before this call is over
//@ refuted PUBLISHES_AFTER_ABORT assertion -DCALLS=2 -DFAULT | after a wait was given up partial rows are sent as if they were good, and their receiver does not look at its flag | KRN-11
//@ refuted EXPORTS_AFTER_ABORT assertion -DCALLS=2 -DFAULT -DDISPATCH | rows are sent although the wait for the header was given up
//@ refuted KEEPS_QUIET deadlock -DCALLS=2 -DFAULT | a rank that gives up neither publishes nor raises the abort flag

#ifndef CALLS
#define CALLS 2
#endif
#define BLOCKS 4
#define LOCAL_LOCS 0

#define OTHER (1 - r)
#define COPIER(r) (2 + (r))        // index of the writing process
#ifdef ONE_ROUTING_BUFFER
#define ROUTING(to, call) ((to) * 2)
#else
#define ROUTING(to, call) ((to) * 2 + (call) % 2)  // all in the memory of rank `to`, written by the other
#endif
#define POSTED(to) (4 + (to))
#define ROWS_POSTED(to) (6 + (to))
#define PLANE(to) (8 + (to))
#define COMBINED(to) (10 + (to))
#define ROW(to, half) (12 + 2 * (to) + (half))
#ifdef FAULT
#define ABORT(to) (16 + (to))
#define LOCS 18
#define COUNTERS 2                 // what happened before a rank's own flag was raised
#define told (mem[ABORT(r)] != 0)
#else
#define LOCS 16
#define COUNTERS 0
#define told false
#endif
#define WANTED 8                   // added to the routing: the sender's tokens go to the receiver's experts
#define REFUSED 16                 // or it refuses the call
#define GARBAGE 255
#define STOP 255

#include "memory.pml"

#define TILES 2                    // of GEMM 1 that read the row

byte exporting[2], exported[2];    // call whose rows the copying blocks of open_call move
bool sends[2];                     // has any for the other rank
bool failed[2];                    // the rank's own abort flag
#if defined(DISPATCH) && defined(FAULT)
#define OWES false
#elif defined(DISPATCH)
bool owed;                         // calls after the first owe partial rows: mega_moe behind dispatch_gemm
#define OWES (call > 1 && owed)
#else
#define OWES true
#endif
#ifdef REFUSALS
byte refused_call;                 // 0: none
bit refuser;
#define REFUSES (refused_call == call && refuser == r)
#endif
#ifdef FAULT
bool may_fail;                     // once, or not at all
bool claimed[2];
#endif

// nvlink::give_up; whoever finds that another has claimed it waits until that one has told everybody
inline give_up(b) {
#ifdef FAULT
    if
    :: d_step { !claimed[r] -> claimed[r] = true };
#ifndef KEEPS_QUIET
        signal(b, ABORT(OTHER), 1);
#endif
        d_step { give(b, r); failed[r] = true }
    :: claimed[r] -> d_step { failed[r] -> take(b, r) }
    fi
#endif
}

// nvlink::spin_until, by process b
inline wait_for(b, word) {
    if
    :: word -> ok = true
#ifdef FAULT
    :: d_step { !(word) && failed[r] -> take(b, r); ok = false }
    :: !(word) && !failed[r] && told -> give_up(b); ok = false
    :: d_step { !(word) && !failed[r] && may_fail -> may_fail = false }; give_up(b); ok = false
#endif
    fi
}

// nvlink::export_rows
proctype copier(bit r) {
    byte call = 1;
    bool ok = true;
    do
    :: call <= CALLS && exporting[r] >= call && exporting[r] != STOP ->
#if defined(DISPATCH) && !defined(NO_EXPORT_WAIT)
        wait_for(COPIER(r), mem[POSTED(r)] >= call);
#endif
#ifdef EXPORTS_AFTER_ABORT
        ok = true;
#endif
        if
        :: sends[r] && ok ->
            put(COPIER(r), ROW(OTHER, 0), call);
            put(COPIER(r), ROW(OTHER, 1), call)
        :: !sends[r] || !ok
        fi;
#ifdef RELAXED_ROWS
        put(COPIER(r), ROWS_POSTED(OTHER), call);
#else
        signal(COPIER(r), ROWS_POSTED(OTHER), call);
#endif
        d_step { exported[r] = call; call++ }
    :: call > CALLS || exporting[r] == STOP -> break
    od
}

#ifdef EXPORTS_EARLY
#define LAUNCHED (call + 1)
#else
#define LAUNCHED call
#endif

// A tile of GEMM 1 (or place_all) reads the row where it has been sent
inline read_row() {
    value = mem[ROW(r, 0)];
    value = (mem[ROW(r, 1)] == value -> value : GARBAGE);  // torn
#ifndef FAULT
    assert(value == call);
#endif
    seen = (seen == value -> value : GARBAGE);
    value = 0;
    tiles++
}

proctype rank(bit r) {
    byte call = 1, value, seen, tiles;
    bool mine, theirs;    // my tokens go there, theirs come here
    bool void_, refuses;  // some rank refuses the call; this one does
    bool ok, good;
    do
    :: call <= CALLS ->
        // open_call
#if defined(FAULT) || defined(REFUSALS)
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
#ifdef REFUSALS
        refuses = REFUSES;
        mine = mine && !refuses;
#endif
        assert(exporting[OTHER] + 1 >= call);  // nobody is two calls ahead
        d_step { sends[r] = mine; exporting[r] = call };
        put(r, ROUTING(OTHER, call), call + mine * WANTED + refuses * REFUSED);
        signal(r, POSTED(OTHER), call);
        wait_for(r, mem[POSTED(r)] >= call);
        if
        :: ok ->
            value = mem[ROUTING(r, call)];
            assert(value % WANTED == call);
            d_step { theirs = (value & WANTED) != 0; void_ = refuses || (value & REFUSED); value = 0 }
        :: !ok -> void_ = true
        fi;
        exported[r] == call;
        exporting[r] = LAUNCHED;
        // gather_gemm: once for all tiles, its loaders wait for the rows of all ranks, also where only own tokens have work here
        ok = true;
        if
#ifndef NO_ROWS_WAIT
        :: !void_ -> wait_for(r, mem[ROWS_POSTED(r)] >= call)
#else
        :: !void_
#endif
        :: !theirs || void_  // without tiles; or place_all, which waits only for rows that it wants
        fi;
        if
        :: theirs && !void_ ->
            seen = call;
            read_row();
#ifdef PUBLISHED_BEFORE_READ
            put(r, PLANE(OTHER), seen);
            signal(r, COMBINED(OTHER), call);
#endif
            do
            :: tiles < TILES -> read_row()
            :: tiles == TILES -> break
            od
        :: !theirs || void_
        fi;
        // gemm_scatter: jobs, then own tokens
#ifdef PUBLISHES_AFTER_ABORT
        good = true;
#else
        good = !failed[r] && !told;
#endif
        if
        :: theirs && good && !void_ && OWES ->
#ifndef PUBLISHED_BEFORE_READ
            put(r, PLANE(OTHER), seen);
            signal(r, COMBINED(OTHER), call)
#else
            skip
#endif
        :: !theirs || !good || void_ || !OWES
        fi;
        if
        :: mine && !void_ && OWES ->
            wait_for(r, mem[COMBINED(r)] >= call);
            if
#ifdef PUBLISHES_AFTER_ABORT
            :: ok -> assert(mem[PLANE(r)] == call)
            :: !ok
#else
            :: ok && !failed[r] && !told -> assert(mem[PLANE(r)] == call)  // the result; else NaN
            :: !ok || failed[r] || told
#endif
            fi
        :: !mine || void_ || !OWES
        fi;
#ifdef DISPATCH
        if
        :: theirs && !void_ && !failed[r] && !told -> assert(seen == call)  // hand_out; else NaN
        :: !theirs || void_ || failed[r] || told
        fi;
#endif
        d_step { seen = 0; tiles = 0; ok = false; good = false; mine = false; theirs = false; void_ = false; refuses = false; call++ };
        if
        :: failed[r] || told -> exporting[r] = STOP; break  // the host refuses further calls
        :: !failed[r] && !told
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
#ifdef REFUSALS
    if
    :: skip
    :: refused_call = 1
    :: refused_call = 2
    :: refused_call = 3; refuser = 1
    :: refused_call = 1; refuser = 1
    :: refused_call = 2; refuser = 1
    fi;
#endif
#if defined(DISPATCH) && !defined(FAULT)
    if
    :: owed = true
    :: skip
    fi;
#endif
    atomic { run rank(0); run rank(1); run copier(0); run copier(1) }
}
