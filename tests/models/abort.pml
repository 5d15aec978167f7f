// What ends a call that cannot succeed. Three ranks compute, send to each other and wait for each other; one of them has a
// second block, which waits for the first and may throw. Ranks die at any step, also half-way through telling the others. Ranks
// that succeed begin the next call.
// No time runs here: with the liveness watch every rank must come to an end without any time-out (timers.pml has the clocks).
//
//@ holds two_deaths -DKILLS=2 -DTHROWS=0
//@ holds throws_and_dies -DKILLS=1 -DTHROWS=1 -DTHROWER=0
//@ holds next_throws -DKILLS=1 -DTHROWS=1 -DTHROWER=1 | a block of the rank after the dying one throws
//@ holds last_throws -DKILLS=1 -DTHROWS=1 -DTHROWER=2 | a block of the rank before the dying one throws
//@ holds no_watch -DKILLS=1 -DTHROWS=0 -DTIMEOUTS | nobody sees the death: the time-outs end it
//@ holds own_flag_first -DKILLS=2 -DTHROWS=0 -DOWN_FLAG_FIRST | the order in which raise_abort goes through the ranks does not matter
//@ refuted NOT_FORWARDED deadlock | abort not forwarded: the flag is raised on the own rank only
//@ refuted TOLD_NOT_PASSED_ON deadlock | a rank that was told does not tell: whoever told it may have died half-way
//@ refuted LOST_IGNORED deadlock | a death ends no wait
//@ refuted LOST_ENDS_ALL_WAITS assertion | a death ends also the waits for ranks that live
//@ refuted NO_SECOND_LOOK assertion | a wait gives up without looking at the word after it saw the death
//@ refuted DEAF_LOCAL_WAIT deadlock -DKILLS=1 -DTHROWS=0 -DTHROWER=1 | a wait for the own rank does not look at the abort flag
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
#define NEXT(r, n) (((r) + (n)) % RANKS)

bool dead[RANKS];            // control_block::lost_ranks too: a wait may see a death at once or any time later
bool abort_flag[RANKS];      // control_block::abort_flag
bool sent[RANKS * RANKS];    // slots: what rank `from` owes the owner in this call has come
bool done[RANKS * RANKS];    // slots: rank `from` is over the call
bool placed;                 // local counter that the second block waits for
bool joined, second_ok;      // the second block has ended, and well
bool raising[RANKS];         // wait_context::record_claim: some block of this rank tells all ranks, or has told them
bool call_ok[RANKS];
bool over[RANKS];            // nothing of this rank runs any more, so its death would change nothing
byte kills, throws;          // that may still happen; fewer than KILLS and THROWS, too, so that no deadlock hides behind them

// protocol::raise_abort: one store per rank, and this process may die between any two. A second pass through it by another
// block of the rank would change nothing (blocks of a rank die together), so it is left out.
inline raise_abort(r) {
    if
    :: d_step { !raising[r] -> raising[r] = true };
#ifdef OWN_FLAG_FIRST
        abort_flag[r] = true;
#endif
#ifndef NOT_FORWARDED
        abort_flag[NEXT(r, 1)] = true;
        abort_flag[NEXT(r, 2)] = true;
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

// protocol::spin_until and wait_for_all: a wait for words of which `missing` is true while one has not come. `lost`: a rank
// whose word has not come is dead. Both are seen in one step: the words have the last say.
inline wait_while(r, missing, lost) {
    if
    :: !ok
    :: ok && !(missing)
#if defined(NO_SECOND_LOOK)
    :: ok && (missing) ->
        if
        :: !(missing)
        :: dead[0] || dead[1] || dead[2] -> assert(lost); give_up(r, false)
        :: (missing) && abort_flag[r] -> give_up(r, true)
        fi
#else
#if defined(LOST_ENDS_ALL_WAITS)
    :: ok && (missing) && (dead[0] || dead[1] || dead[2]) -> assert(lost); give_up(r, false)
#elif !defined(LOST_IGNORED) && !defined(TIMEOUTS)
    :: ok && (lost) -> give_up(r, false)
#endif
    :: ok && (missing) && abort_flag[r] -> give_up(r, true)
#ifdef TIMEOUTS
    :: ok && (missing) && !abort_flag[r] -> give_up(r, false)
#endif
#endif
    fi
}
#define wait_for(r, p) wait_while(r, !sent[AT(r, p)], !sent[AT(r, p)] && dead[p])
#define MISSING(r, n) (!done[AT(r, NEXT(r, n))])
#define wait_for_previous_call(r) \
    wait_while(r, MISSING(r, 1) || MISSING(r, 2), (MISSING(r, 1) && dead[NEXT(r, 1)]) || (MISSING(r, 2) && dead[NEXT(r, 2)]))

// patterns::launch with its first block, then the start of the next call
proctype rank(byte r) {
    bool ok = true;
    {
        if
        :: abort_flag[r] -> ok = false  // compute_tiles and send_rows look before each item
        :: sent[AT(NEXT(r, 1), r)] = true; sent[AT(NEXT(r, 2), r)] = true
        fi;
        wait_for(r, NEXT(r, 1));
        wait_for(r, NEXT(r, 2));
        d_step {
            if
            :: r == THROWER && ok -> placed = true
            :: else
            fi
        };
        d_step {
            joined || r != THROWER ->
#ifndef PARTIAL_RESULT
            ok = ok && (second_ok || r != THROWER) && !abort_flag[r];
#endif
            call_ok[r] = ok;
            // the result is handed out if ok
            assert(!ok || (sent[AT(r, NEXT(r, 1))] && sent[AT(r, NEXT(r, 2))] && (second_ok || r != THROWER)))
        };
        if
        :: ok
#if defined(TOLD_NOT_PASSED_ON)
        :: !ok
#elif defined(THROWS_SILENTLY)
        :: !ok && !abort_flag[r]
        :: !ok && abort_flag[r] -> raise_abort(r)
#else
        :: !ok -> raise_abort(r)  // protocol::close_record, or Session._abandon after an exception
#endif
        fi;
        if
#ifdef ARRIVES_ANYWAY
        :: true ->
            ok = true;
#else
        :: ok ->
#endif
            done[AT(NEXT(r, 1), r)] = true;  // protocol::arrive
            done[AT(NEXT(r, 2), r)] = true;
            wait_for_previous_call(r);
            assert(!ok || (call_ok[0] && call_ok[1] && call_ok[2]))
#ifndef ARRIVES_ANYWAY
        :: !ok
#endif
        fi;
        over[r] = true
    } unless { dead[r] }
}

// A block whose wait is for its own rank.
proctype second_block(byte r) {
    {
        if
        :: placed -> second_ok = true
#ifndef DEAF_LOCAL_WAIT
        :: d_step { !placed && abort_flag[r] }  // give_up of a local wait: the others speak
#endif
        :: d_step { throws > 0 -> throws-- };
#ifndef THROWS_SILENTLY
            raise_abort(r)
#else
            skip
#endif
        fi;
        joined = true
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
    if
    :: kills = KILLS
    :: kills = KILLS / 2
    fi;
    if
    :: throws = THROWS
    :: throws = 0
    fi;
    atomic {
        run rank(0);
        run rank(1);
        run rank(2);
        run second_block(THROWER)
    }
}
