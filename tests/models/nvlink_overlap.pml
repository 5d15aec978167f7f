// The two GEMMs of one rank over NVLink: gemm_scatter starts while gather_gemm ends (programmatic launch), gated row block by row
// block. open_call ends when the rows are there; the loaders of gather_gemm read a row where its owner has sent it, for each tile anew; the owner sends the next call's row
// to the same place when it has the partial row of this one. Two multiprocessors, two row blocks of one slot, two column blocks of
// GEMM 1 and one of GEMM 2, one job for the token whose slots are in both row blocks.
//
//@ holds three_calls -DCALLS=3
//@ holds small_calls -DCALLS=3 -DROW_BLOCKS=1 | a block of each GEMM has no tiles
//@ holds waits_fail -DCALLS=1 -DROW_BLOCKS=1 -DFAULT | any waits may be given up at any time, also several before anybody was told
//@ refuted NO_ROWS_WAIT assertion | open_call ends before the rows of the other ranks are there
//@ refuted WAITS_IN_FIRST_CALL assertion | open_call waits for rows that were ever posted, not for those of its call
//@ refuted GATE_ONE_LESS assertion | GEMM 2 begins when all but one column block of GEMM 1 is done
//@ refuted NO_PREREQUISITE_WAIT assertion -DROW_BLOCKS=1 | what finishes does not wait for the end of gather_gemm: the next call's tables are written while a block may still read its tasks
//@ refuted RELAXED_TILES assertion | counting a finished tile of GEMM 1 does not release it to GEMM 2
//@ refuted TRUSTS_WATERMARK assertion -DCALLS=1 -DROW_BLOCKS=1 -DFAULT | the source takes a partial row without looking at its abort flag behind the watermark | KRN-11

#ifndef CALLS
#define CALLS 2
#endif
#ifndef ROW_BLOCKS
#define ROW_BLOCKS 2
#endif
#define TILES(i) (i)          // index of the writing process
#define SCATTER(i) (2 + (i))
#define SPARE 4
#define OWNER 5
#define STREAM 6
#define BLOCKS 7

#define X(b) (b)                        // expert output of a row block
#define ACTIVATED(b, c) (2 + 2 * (b) + (c))
#define LOCAL_LOCS 63
#define ROW 6                           // the row, as its owner has sent it
#define ROWS_POSTED 7
#define PLANE 8                         // at the token's owner; likewise below
#define COMBINED 9
#ifdef FAULT
#define ABORT 10
#define LOCS 11
#else
#define LOCS 10
#endif

#define L1_DONE(b) (b)                  // counters: what happened before
#define L2_DONE(b) (2 + (b))
#define FLAG 4
#define COUNTERS 5

#define IN(call) ((call) * 4)
#define OUT(call, b) ((call) * 4 + 1 + (b))
#define GARBAGE 255

#include "memory.pml"

byte l1_done[2], l2_done[2], next_item;  // zeroed by open_call
byte opened;                  // the call whose tables are there
byte started;                 // blocks of gather_gemm in all calls that have let gemm_scatter start
byte gone[2];                 // calls that a block of gather_gemm is through with
byte running, left;           // blocks of gemm_scatter in all calls that have begun, that have ended
byte spare_begun, spare_done; // calls that its spare warp has begun, has ended
byte combined;                // ghost: calls whose job was done
#ifdef FAULT
bool claimed, flag;           // record_claim, this rank's abort flag
#define failing true
#else
#define failing false
#endif

#define GATHERS_GONE (gone[0] + gone[1])

// nvlink::give_up
inline give_up(b) {
#ifdef FAULT
    if
    :: d_step { !claimed -> claimed = true };
        signal(b, ABORT, 1);
        d_step { give(b, FLAG); flag = true }
    :: claimed -> d_step { flag -> take(b, FLAG) }  // the model nvlink_abort says why
    fi;
#endif
    ok = false
}

// counter_wait: by process b, for a counter of this GPU
inline wait_for(b, counter, word) {
    if
    :: d_step { (word) && can_read(counter) -> take(b, counter); ok = true }
    :: failing && !(word) -> give_up(b)
    fi
}

// The owner of the token: export_rows, then reduce_tokens
proctype owner() {
    byte call = 1;
    do
    :: call <= CALLS ->
        put(OWNER, ROW, IN(call));
        signal(OWNER, ROWS_POSTED, call);
        if
        :: mem[COMBINED] == call ->
#if defined(FAULT) && !defined(TRUSTS_WATERMARK)
            if
            :: mem[ABORT] == 0 -> assert(mem[PLANE] == call)  // the result; else NaN
            :: mem[ABORT] != 0
            fi
#else
            assert(mem[PLANE] == call)
#endif
#ifdef FAULT
        :: mem[ABORT] != 0
#endif
        fi;
        call++
    :: else -> break
    od
}

// await_rows
inline await_rows() {
#ifdef WAITS_IN_FIRST_CALL
#define POSTED (mem[ROWS_POSTED] >= 1)
#elif defined(NO_ROWS_WAIT)
#define POSTED true
#else
#define POSTED (mem[ROWS_POSTED] >= call)
#endif
    if
    :: POSTED
    :: failing && !POSTED -> give_up(STREAM)
    fi
}

// open_call, launch after launch of one stream
proctype stream() {
    byte call = 1;
    bool ok;
    do
    :: call <= CALLS ->
        left == 2 * (call - 1);      // gemm_scatter is over
        assert(combined == call - 1);
        await_rows();
        d_step {
            l1_done[0] = 0; l1_done[1] = 0; l2_done[0] = 0; l2_done[1] = 0; next_item = 0;
            opened = call; ok = false
        };
        call++
    :: else -> break
    od
}

inline tile(b, col) {
    value = mem[ROW];
    if
    :: value != IN(call) -> assert(failing); value = GARBAGE
    :: else
    fi;
    put(TILES(i), ACTIVATED(b, col), value);
    d_step {
#ifndef RELAXED_TILES
        give(TILES(i), L1_DONE(b));
#endif
        l1_done[b]++;
        value = 0; ok = false
    }
}

// Loaders, consumers and storers of a block of gather_gemm; tasks in turn, the second column goes upwards
proctype tiles(bit i) {
    byte call = 1, value;
    bool ok;
    do
    :: call <= CALLS ->
        d_step { opened >= call -> started++ };
#if ROW_BLOCKS == 2
        tile(i, 0);
        tile(1 - i, 1);
#else
        if
        :: i == 0 -> tile(0, 0); tile(0, 1)
        :: else
        fi;
#endif
        assert(opened == call);      // until here it reads its tasks
        d_step { gone[i] = call; call++ }
    :: else -> break
    od
}

#ifdef GATE_ONE_LESS
#define GATE 1
#else
#define GATE 2
#endif

// combine_and_reduce, by process me
inline finish(me) {
#ifndef NO_PREREQUISITE_WAIT
    GATHERS_GONE == 2 * call;  // griddepcontrol.wait
#endif
#ifdef FAULT
    d_step { given_up = flag; if :: flag -> take(me, FLAG) :: else fi };
#endif
    d_step { item = next_item; next_item++ };
    if
    :: item == 0 && !given_up ->
        wait_for(me, L2_DONE(0), l2_done[0] >= 1);
        if
        :: ok && ROW_BLOCKS > 1 -> wait_for(me, L2_DONE(1), l2_done[1] >= 1)
        :: !ok || ROW_BLOCKS == 1
        fi;
        if
        :: ok ->
            value = GARBAGE;
            if
            :: mem[X(0)] == OUT(call, 0) && (ROW_BLOCKS == 1 || mem[X(1)] == OUT(call, 1)) -> value = call
            :: else -> assert(failing)
            fi;
            put(me, PLANE, value);
            signal(me, COMBINED, call);
            combined++
        :: !ok
        fi
    :: item != 0 || given_up
    fi;
    d_step { item = 0; value = 0; ok = false; given_up = false }
}

// A block of gemm_scatter: GEMM 2 of row block i, then the finish. It starts where a multiprocessor is free.
proctype scatter(bit i) {
    byte call = 1, item, value;
    bool ok, given_up;
    do
    :: call <= CALLS ->
        d_step { started >= 2 * call && running - left < GATHERS_GONE - 2 * (call - 1) && left >= 2 * (call - 1) ->
            running++;
            if
            :: i == 0 -> spare_begun = call
            :: else
            fi
        };
        if
        :: i < ROW_BLOCKS ->
            wait_for(SCATTER(i), L1_DONE(i), l1_done[i] >= GATE);
            value = OUT(call, i);
            if
            :: mem[ACTIVATED(i, 0)] != IN(call) || mem[ACTIVATED(i, 1)] != IN(call) -> assert(failing); value = GARBAGE
            :: else
            fi;
            put(SCATTER(i), X(i), value);
            d_step { give(SCATTER(i), L2_DONE(i)); l2_done[i]++ };
            d_step { value = 0; ok = false }
        :: else
        fi;
        finish(SCATTER(i));
        if
        :: i == 1
        :: i == 0 -> spare_done == call
        fi;
        d_step { left++; call++ }
    :: else -> break
    od
}

proctype spare() {
    byte call = 1, item, value;
    bool ok, given_up;
    do
    :: call <= CALLS ->
        spare_begun == call;
        finish(SPARE);
        d_step { spare_done = call; call++ }
    :: else -> break
    od
}

init {
    atomic {
        run stream(); run owner(); run tiles(0); run tiles(1); run scatter(0); run scatter(1); run spare()
    }
}
