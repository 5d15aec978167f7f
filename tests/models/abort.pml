// What ends a call that cannot succeed. Three ranks, each with two blocks: one sends and waits for the other ranks, one waits
// for the first. Ranks die at any step (also half-way through telling the others), a block may throw. Then the next call begins.
// No time runs here: with the liveness watch every rank must come to an end without any time-out (timers.pml has the clocks).
//
//@ holds two_deaths -DKILLS=2 -DTHROWS=0
//@ holds throws_and_dies -DKILLS=1 -DTHROWS=1 -DTHROWER=0
//@ holds next_throws -DKILLS=1 -DTHROWS=1 -DTHROWER=1 | a block of the rank after the dying one throws
//@ holds last_throws -DKILLS=1 -DTHROWS=1 -DTHROWER=2 | a block of the rank before the dying one throws
//@ holds no_watch -DKILLS=1 -DTHROWS=0 -DTIMEOUTS | nobody sees the death: the time-outs end it
//@ holds own_flag_first -DKILLS=1 -DTHROWS=1 -DTHROWER=0 -DOWN_FLAG_FIRST | the order in which raise_abort goes through the ranks does not matter
//@ refuted NOT_FORWARDED deadlock | abort not forwarded: the flag is raised on the own rank only
//@ refuted TOLD_NOT_PASSED_ON deadlock | a rank that was told does not tell: whoever told it may have died half-way
//@ refuted LOST_IGNORED deadlock | a death ends no wait
//@ refuted LOST_ENDS_ALL_WAITS assertion | a death ends also the waits for ranks that live
//@ refuted NO_SECOND_LOOK assertion | a wait gives up without looking at the word after it saw the death
//@ refuted DEAF_LOCAL_WAIT deadlock | a wait for the own rank does not look at the abort flag
//@ refuted THROWS_SILENTLY deadlock | a block that throws tells nobody
//@ refuted PARTIAL_RESULT assertion | the launch looks at one block only and hands out the result | KRN-11
//@ refuted ARRIVES_ANYWAY assertion | a failed call is closed like a good one: the others begin the next

#define RANKS 3
#ifndef KILLS
#define KILLS 1
#define THROWS 1
#endif
#ifndef THROWER
#define THROWER 0
#endif
#define AT(owner, from) ((owner) * RANKS + (from))

bool dead[RANKS];            // control_block::lost_ranks too: a wait may see a death at once or any time later
bool abort_flag[RANKS];      // control_block::abort_flag
bool sent[RANKS * RANKS];    // slots: rows of rank `from` have come to the owner
bool done[RANKS * RANKS];    // slots: rank `from` is over the call
bool placed[RANKS];          // local counter that the second block waits for
bool raising[RANKS];         // wait_context::record_claim: some block of this rank tells all ranks, or has told them
bool joined[RANKS];          // the second block has ended
bool block_ok[RANKS];        // ... and well
bool call_ok[RANKS];
bool over[RANKS];            // nothing of this rank runs any more, so its death would change nothing
byte kills = KILLS, throws = THROWS;

// protocol::raise_abort: one store per rank, and this process may die between any two. A second pass through it by another
// block of the rank would change nothing (blocks of a rank die together), so it is left out.
inline raise_abort(r) {
    if
    :: d_step { !raising[r] -> raising[r] = true };
#ifdef OWN_FLAG_FIRST
        abort_flag[r] = true;
#endif
#ifndef NOT_FORWARDED
        abort_flag[(r + 1) % RANKS] = true;
        abort_flag[(r + 2) % RANKS] = true;
#endif
        abort_flag[r] = true
    :: raising[r]
    fi
}

// protocol::give_up of a wait for another rank
inline give_up(r, was_told) {
#ifdef TOLD_NOT_PASSED_ON
    if
    :: was_told
    :: !was_told -> raise_abort(r)
    fi;
#else
    raise_abort(r);
#endif
    ok = false
}

// protocol::spin_until and wait_for_all, for a word of rank p. In one step it is seen why the wait ends.
inline wait_for(r, p, word) {
    if
    :: word
#if defined(NO_SECOND_LOOK)
    :: !word ->
        if
        :: word
        :: dead[p] -> assert(!word); give_up(r, false)
        :: !word && abort_flag[r] -> give_up(r, true)
        fi
#elif defined(LOST_ENDS_ALL_WAITS)
    :: !word && (dead[0] || dead[1] || dead[2]) -> assert(dead[p]); give_up(r, false)
#elif !defined(LOST_IGNORED) && !defined(TIMEOUTS)
    :: !word && dead[p] -> give_up(r, false)
#endif
#ifndef NO_SECOND_LOOK
    :: !word && abort_flag[r] -> give_up(r, true)
#endif
#ifdef TIMEOUTS
    :: !word && !abort_flag[r] -> give_up(r, false)
#endif
    fi
}

#define NEXT(r, n) (((r) + (n)) % RANKS)

// patterns::launch with its first block, then the start of the next call
proctype rank(byte r) {
    bool ok = true;
    {
        sent[AT(NEXT(r, 1), r)] = true;
        sent[AT(NEXT(r, 2), r)] = true;
        wait_for(r, NEXT(r, 1), sent[AT(r, NEXT(r, 1))]);
        if
        :: ok -> wait_for(r, NEXT(r, 2), sent[AT(r, NEXT(r, 2))])
        :: else
        fi;
        if
        :: ok -> placed[r] = true
        :: else
        fi;
        joined[r];
#ifndef PARTIAL_RESULT
        ok = ok && block_ok[r] && !abort_flag[r];
#endif
        if
        :: ok ->
            // the result is handed out
            assert(sent[AT(r, NEXT(r, 1))] && sent[AT(r, NEXT(r, 2))] && placed[r] && block_ok[r]);
            call_ok[r] = true
        :: else
#if defined(TOLD_NOT_PASSED_ON)
            -> skip
#elif defined(THROWS_SILENTLY)
            -> if
            :: abort_flag[r] -> raise_abort(r)
            :: else
            fi
#else
            -> raise_abort(r)  // protocol::close_record, or Session._abandon after an exception
#endif
        fi;
#ifndef ARRIVES_ANYWAY
        if
        :: ok ->
#endif
            done[AT(NEXT(r, 1), r)] = true;  // protocol::arrive
            done[AT(NEXT(r, 2), r)] = true;
            // the next call: protocol::wait_for_previous_call
            wait_for(r, NEXT(r, 1), done[AT(r, NEXT(r, 1))]);
            if
            :: ok -> wait_for(r, NEXT(r, 2), done[AT(r, NEXT(r, 2))])
            :: else
            fi;
            assert(!ok || (call_ok[0] && call_ok[1] && call_ok[2]))
#ifndef ARRIVES_ANYWAY
        :: else
        fi
#endif
        ;
        over[r] = true
    } unless { dead[r] }
}

// A block whose wait is for its own rank.
proctype local_block(byte r) {
    {
        if
        :: placed[r] -> block_ok[r] = true
#ifndef DEAF_LOCAL_WAIT
        :: d_step { !placed[r] && abort_flag[r] }  // give_up of a local wait: the others speak
#endif
        :: d_step { throws > 0 && r == THROWER -> throws-- };
#ifndef THROWS_SILENTLY
            raise_abort(r)
#else
            skip
#endif
        fi;
        joined[r] = true
    } unless { dead[r] }
}

#define DIES(r) :: d_step { kills > 0 && !dead[r] && !over[r] -> dead[r] = true; kills-- }

// The ranks are alike but for their places in the circle, so the first to die may be called rank 0; of two, the other may be
// called rank 1 (in either order).
active proctype fate() {
end:
    do
    DIES(0)
#if KILLS > 1
    DIES(1)
#endif
    od
}

init {
    atomic {
        run rank(0);
        run rank(1);
        run rank(2);
        run local_block(0);
        run local_block(1);
        run local_block(2)
    }
}
