// Giving up in gemm_scatter over NVLink: two gates and a combining warp of one rank, one of whose waits may be given up at any time,
// also several at once. The first one tells the other ranks; all go on, on whatever data there is. Rank `source` wants a partial row
// of this rank, and must not take one that was made of such data. A third rank may have told this one and died half-way.
//
//@ holds time_outs
//@ holds told -DPEER
//@ refuted CLAIMED_IS_ENOUGH assertion | a wait that is given up second goes on before the first has told the others | KRN-11
//@ refuted OWN_FLAG_IS_ENOUGH assertion -DPEER | it goes on when this rank's abort flag is up, which a third rank may have raised | KRN-11
//@ refuted TRUSTS_WATERMARK assertion | the source does not look at its abort flag behind the watermark | KRN-11

#define GATE(i) (i)           // index of the writing process
#define FINISH 2
#define THIRD 3
#define BLOCKS 4

#define X(i) (i)              // expert output of row block i
#define PLANE 2               // at the source; likewise below
#define COMBINED 3
#define ABORT 4               // its abort flag, as this rank writes it
#ifdef PEER
#define THIRDS_ABORT 5        // and as the third rank does
#define TOLD 6                // this rank's own flag, by the third rank
#define LOCS 7
#define told (mem[TOLD] != 0)
#define source_told (mem[ABORT] != 0 || mem[THIRDS_ABORT] != 0)
#else
#define LOCS 5
#define told false
#define source_told (mem[ABORT] != 0)
#endif
#define LOCAL_LOCS 3

#define L2_DONE(i) (i)        // counters: what happened before
#define CLAIM 2
#define COUNTERS 3
#define GOOD 1
#define GARBAGE 2

#include "memory.pml"

bool l1_done[2], l2_done[2];
bool claimed, told_all, flag;  // record_claim and its upper bit; this rank's abort flag, as it writes it itself

// The end of gather_gemm on other multiprocessors
proctype gemm1() {
    l1_done[0] = true;
    l1_done[1] = true
}

// nvlink::give_up
inline give_up(b) {
    if
    :: d_step { !claimed -> claimed = true };
        signal(b, ABORT, 1);
        flag = true;
        d_step { give(b, CLAIM); told_all = true }
    :: claimed ->
#if defined(CLAIMED_IS_ENOUGH)
        skip
#elif defined(OWN_FLAG_IS_ENOUGH)
        flag || told
#else
        d_step { told_all -> take(b, CLAIM) }
#endif
    fi;
    ok = false
}

proctype gate(bit i) {
    bool ok = true;
    byte value;
    if
    :: l1_done[i]
    :: !l1_done[i] -> give_up(GATE(i))  // its time is over, or it was told
    fi;
    value = (ok -> GOOD : GARBAGE);
    put(GATE(i), X(i), value);
    d_step { give(GATE(i), L2_DONE(i)); l2_done[i] = true };
    value = 0
}

// nvlink::combine_and_reduce: one job, with slots in row block 0 only; whoever gives up for row block 1 is of no concern to it
proctype finish() {
    bool ok = true, given_up;
    byte value;
    given_up = flag || told;
    if
    :: !given_up ->
        if
        :: d_step { l2_done[0] && can_read(L2_DONE(0)) -> take(FINISH, L2_DONE(0)) }
        :: !l2_done[0] -> give_up(FINISH)
        fi;
        if
        :: ok ->
            value = mem[X(0)];
            put(FINISH, PLANE, value);
            signal(FINISH, COMBINED, 1)
        :: !ok
        fi
    :: given_up
    fi
}

#ifdef PEER
proctype third() {
    put(THIRD, TOLD, 1);
    if
    :: put(THIRD, THIRDS_ABORT, 1)
    :: skip  // it is gone
    fi
}
#endif

// nvlink::reduce_tokens
proctype source() {
    if
    :: mem[COMBINED] == 1 ->
        if
#ifdef TRUSTS_WATERMARK
        :: assert(mem[PLANE] == GOOD)
#else
        :: !source_told -> assert(mem[PLANE] == GOOD)  // the result; else NaN
        :: source_told
#endif
        fi
    :: source_told
#ifdef PEER
    :: told && mem[COMBINED] == 0  // nobody of this rank waits any more, and the third is gone: its loss ends the wait
#endif
    fi
}

init {
    atomic {
        run gemm1(); run gate(0); run gate(1); run finish(); run source();
#ifdef PEER
        run third()
#endif
    }
}
