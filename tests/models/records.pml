// Wait records. Two blocks of rank 0 give up; the first files the record of its rank in the memory of rank 1, and when no block
// runs any more the final record replaces it. Rank 1 reads whenever it likes. A record is several words; `kind` is its flag:
// none, or a number that grows with every record and is odd while the words are being replaced.
//
//@ holds final_record
//@ refuted KIND_NOT_RELEASED assertion | the word that makes a record valid may overtake the rest of it
//@ refuted KIND_FIRST assertion | the record is marked valid, then written
//@ refuted CLAIM_NOT_ATOMIC assertion | two blocks that give up at once both find that nobody has
//@ refuted REPLACED_IN_PLACE assertion | the final record is written over the first one while that is marked valid
//@ refuted NOT_LOOKED_AGAIN assertion | the reader does not look whether the record was replaced under its hands

#define BLOCKS 3
#define COUNTERS 0
#define LOCAL_LOCS 0
#define LOCS 3
#define CLOSER 2

#define BODY(i) (i)   // the words of the record, at the reader: here the number of who wrote them
#define KIND 2
#define NONE 0
#define FIRST 2       // kinds: first record valid, being replaced, final record valid
#define REPLACING 3
#define FINAL 4

#include "memory.pml"

bool claimed;         // wait_context::record_claim
byte ended;

// protocol::write_record
inline write_first(b) {
#if defined(KIND_FIRST)
    signal(b, KIND, FIRST);
    put(b, BODY(0), b + 1);
    put(b, BODY(1), b + 1)
#else
    put(b, BODY(0), b + 1);
    put(b, BODY(1), b + 1);
#ifdef KIND_NOT_RELEASED
    put(b, KIND, FIRST)
#else
    signal(b, KIND, FIRST)
#endif
#endif
}

// protocol::give_up, file_record
proctype block(byte b) {
#ifdef CLAIM_NOT_ATOMIC
    if
    :: claimed
    :: !claimed -> claimed = true; write_first(b)
    fi;
#else
    if
    :: d_step { !claimed -> claimed = true }; write_first(b)
    :: claimed
    fi;
#endif
    ended++
}

// protocol::close_record, after the blocks have been joined
proctype closer() {
    ended == 2;
    d_step { before[CLOSER] = before[0] | before[1] };
#ifdef REPLACED_IN_PLACE
    put(CLOSER, BODY(0), CLOSER + 1);
    put(CLOSER, BODY(1), CLOSER + 1);
#else
    put(CLOSER, KIND, REPLACING);
    signal(CLOSER, BODY(0), CLOSER + 1);  // after the fence: behind the mark
    signal(CLOSER, BODY(1), CLOSER + 1);
#endif
    signal(CLOSER, KIND, FINAL)
}

// protocol::read_record
proctype reader() {
    byte kind, first, second, looks;
    do
    :: looks < 3 ->
        kind = mem[KIND];
        first = mem[BODY(0)];
        second = mem[BODY(1)];
        if
#ifdef NOT_LOOKED_AGAIN
        :: kind == FIRST || kind == FINAL -> assert(first == second && (kind != FINAL || first == CLOSER + 1))
        :: else
#else
        :: (kind == FIRST || kind == FINAL) && mem[KIND] == kind -> assert(first == second && (kind != FINAL || first == CLOSER + 1))
        :: else
#endif
        fi;
        d_step { kind = 0; first = 0; second = 0; looks++ }
    :: else -> break
    od
}

init { atomic { run block(0); run block(1); run closer(); run reader() } }
