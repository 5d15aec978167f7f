// The clocks of bounded waits. Rank 2 works item by item and then delivers to rank 1, which waits for it and passes on to rank 0,
// where one block waits for rank 1 and another for the first block. Time runs in ticks; a waiter looks once per
// tick, or only every other tick if it is starved (STARVED).
//
// While rank 2 works (an item in at most SLOW ticks) no wait may run out, even if rank 0 is stopped and continued (FREEZE) or the
// whole machine is paused (PAUSE). If rank 2 is stuck (STUCK), all waits must end before END, and at rank 0 the wait for the other
// rank must speak first, since only it names whom it misses.
//
//@ holds at_work
//@ holds stopped_and_continued -DFREEZE
//@ holds machine_paused -DPAUSE
//@ holds stuck -DSTUCK
//@ holds stuck_and_starved -DSTUCK -DSTARVED | waiters get to look only every other tick: they must end all the same
//@ refuted COUNTS_FROM_BEGIN assertion | the time runs from the begin of the wait: slow is taken for stuck | KRN-10
//@ refuted OWN_PROGRESS_ONLY assertion | a wait for the own rank looks at the own rank's progress only | KRN-10
//@ refuted PRODUCER_ONLY assertion | a wait looks at the progress of its producer only, which may itself wait for one at work | KRN-10
//@ refuted NO_SECOND_LOOK assertion -DFREEZE | the time is over, but the word has come since it was looked at
//@ refuted STOPPED_TIME_COUNTS assertion -DPAUSE | time in which the waiter did not run is held against the others
//@ refuted STOPPED_TIME_FORGIVEN assertion -DSTUCK -DSTARVED | such time does not count at all: who always looks late waits for ever
//@ refuted NO_GRACE assertion -DSTUCK | waits for the own rank have the same limit as those for others

#define LIMIT 6      // wait_context::timeout_ns
#define GRACE 2      // LOCAL_GRACE_NS
#define FROZEN 1     // patience::FROZEN_NS
#define SLOW 3
#define ITEMS 2
#ifdef STUCK
#define END 40       // by then every wait has ended
#else
#define END 18       // as far as we look
#endif
#define NEVER 255

#define RELAY 0      // rank 1 waits for rank 2
#define REMOTE 1     // rank 0 waits for rank 1
#define LOCAL 2      // rank 0 waits for its own block REMOTE
#define WAITS 3

byte now;
byte left = SLOW;    // ticks until rank 2 has to have finished its item
bool stuck;          // rank 2 will not do anything any more
byte progress[3];    // of each rank, as the others have heard of it
bool word[WAITS];    // what each wait waits for
byte looked[WAITS], alive[WAITS], last_sign[WAITS];  // patience
bool waits[WAITS];   // the wait is not over yet
bool gave_up[WAITS];
bool aborted;

#ifdef STARVED
#define SLACK 2
#else
#define SLACK 1
#endif
#ifdef FREEZE
bool stopped, continued;  // rank 0, all of it: SIGSTOP, SIGCONT
#define runs(w) ((w) == RELAY || !stopped)
#else
#define runs(w) true
#endif
#define on_time(w) (!waits[w] || !runs(w) || now - looked[w] < SLACK)
#define in_time (stuck || left > 0)

active proctype clock() {
#ifdef PAUSE
    bool paused;
#endif
end:
    do
    :: d_step {
            (waits[0] || waits[1] || waits[2]) && now < END && in_time && on_time(0) && on_time(1) && on_time(2) ->
            now++;
#ifdef STUCK
            assert(now < END);  // every wait ends
#endif
            if
            :: left > 0 && !stuck -> left--
            :: else
            fi
        }
#ifdef FREEZE
    :: d_step { !stopped && !continued -> stopped = true }
    :: d_step { stopped -> stopped = false; continued = true }
#endif
#ifdef PAUSE
    :: d_step { !paused && now < 12 -> paused = true; now = now + 12 }  // nobody runs; what is under way stays so
#endif
    od
}

// Rank 2. Peers hear of progress at most every so often, so of the last item perhaps never: note_progress.
active proctype worker() {
    byte item;
    do
    :: item < ITEMS ->
        if
        :: d_step {
                item++;
                left = SLOW;
                if
                :: item < ITEMS -> progress[2]++
                :: else -> word[RELAY] = true; stuck = true
                fi
            }
#ifdef STUCK
        :: d_step { stuck = true; left = NEVER; item = ITEMS + 1 }
#endif
        fi
    :: item >= ITEMS -> break
    od
}

// protocol::signs_of_life
#if defined(OWN_PROGRESS_ONLY)
#define sign_of(w) ((w) == LOCAL -> progress[0] : progress[0] + progress[1] + progress[2])
#elif defined(PRODUCER_ONLY)
#define sign_of(w) ((w) == RELAY -> progress[2] : ((w) == REMOTE -> progress[1] : progress[0] + progress[1] + progress[2]))
#else
#define sign_of(w) (progress[0] + progress[1] + progress[2])
#endif

#if defined(NO_GRACE)
#define limit(w) LIMIT
#else
#define limit(w) ((w) == LOCAL -> LIMIT + GRACE : LIMIT)
#endif

// protocol::patience::over
#define reckon(w) \
    if \
    :: now - looked[w] > FROZEN -> alive[w] = alive[w] + FORGIVEN(w) \
    :: else \
    fi; \
    looked[w] = now; \
    if \
    :: sign != last_sign[w] -> last_sign[w] = sign; alive[w] = ALIVE(w) \
    :: else \
    fi; \
    over = now - alive[w] >= limit(w)

#if defined(STOPPED_TIME_COUNTS)
#define FORGIVEN(w) 0
#elif defined(STOPPED_TIME_FORGIVEN)
#define FORGIVEN(w) (now - looked[w])
#else
#define FORGIVEN(w) (now - looked[w] - FROZEN)
#endif
#ifdef COUNTS_FROM_BEGIN
#define ALIVE(w) alive[w]
#else
#define ALIVE(w) now
#endif

// protocol::spin_until
proctype wait(byte w) {
    byte sign;
    bool over, ended;
    do
    :: word[w] && runs(w) -> break
    :: d_step { !word[w] && runs(w) && looked[w] != now -> sign = sign_of(w) };
        d_step {
            runs(w);
            reckon(w);
            sign = 0;
#ifdef NO_SECOND_LOOK
            ended = over;
#else
            ended = over && !word[w];
#endif
            over = false;
            if
            :: ended ->
#ifndef STUCK
                assert(false);  // a wait ran out although everybody was at work
#endif
#ifndef STARVED
                assert(w != LOCAL || gave_up[REMOTE] || aborted);
#endif
                gave_up[w] = true;
                aborted = true
            :: else
            fi
        };
        if
        :: ended -> break
        :: !ended && aborted -> break
        :: !ended && !aborted
        fi
    od;
    skip;
    d_step {
        runs(w);
        if
        :: w == RELAY && word[w] -> word[REMOTE] = true; progress[1]++
        :: w == REMOTE && word[w] -> word[LOCAL] = true; progress[0]++
        :: else
        fi;
        waits[w] = false;
        ended = false
    }
}

init {
    atomic {
        waits[0] = true;
        waits[1] = true;
        waits[2] = true;
        run wait(RELAY);
        run wait(REMOTE);
        run wait(LOCAL)
    }
}
