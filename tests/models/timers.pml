// The clocks of bounded waits. Rank 2 works item by item and then delivers to rank 1, which waits for it and passes on to rank 0,
// where one block waits for rank 1 and another for the first block: the two waits that are modelled. Time runs in ticks; a waiter
// looks once per tick, or only every other tick if it is starved (STARVED).
//
// While rank 2 works (an item in at most SLOW ticks) no wait may run out, even if rank 0 is stopped and continued (STOPS) or the
// whole machine is paused (PAUSE). If rank 2 is stuck (STUCK), both waits must end before END, and the wait for the other rank must
// speak first, since only it names whom it misses. If rank 2 is late (LATE), no wait may give up when its word has come.
//
//@ holds at_work
//@ holds stopped_and_continued -DSTOPS
//@ holds machine_paused -DPAUSE
//@ holds late -DLATE
//@ holds barrier -DBARRIER | wait_for_all: a rank that comes is a sign of life too
//@ holds stuck -DSTUCK
//@ holds stuck_and_starved -DSTUCK -DSTARVED | waiters get to look only every other tick: they must end all the same
//@ refuted COUNTS_FROM_BEGIN assertion | the time runs from the begin of the wait: slow is taken for stuck | KRN-10
//@ refuted OWN_PROGRESS_ONLY assertion | a wait for the own rank looks at the own rank's progress only | KRN-10
//@ refuted PRODUCER_ONLY assertion | a wait looks at the progress of its producer only, which may itself wait for one at work | KRN-10
//@ refuted SIGNS_CANCEL assertion -DBARRIER | progress is added to the number of missing ranks: who finishes and comes leaves the sum as it was | KRN-10
//@ refuted NO_SECOND_LOOK assertion -DLATE | the time is over, but the word has come since it was looked at
//@ refuted STOPPED_TIME_COUNTS assertion -DPAUSE | time in which the waiter did not run is held against the others
//@ refuted STOPPED_TIME_FORGIVEN assertion -DSTUCK -DSTARVED | such time does not count at all: who always looks late waits for ever
//@ refuted NO_GRACE assertion -DSTUCK | waits for the own rank have the same limit as those for others

#define LIMIT 6      // wait_context::timeout_ns
#define GRACE 2      // LOCAL_GRACE_NS
#define FROZEN 1     // patience::FROZEN_NS
#define SLOW 3
#if defined(STOPS) || defined(STARVED)
#define ITEMS 1      // of rank 2
#else
#define ITEMS 2
#endif
#if defined(STARVED)
#define END 40       // STUCK: by then every wait has ended; else as far as we look
#elif defined(STOPS)
#define END 14
#else
#define END 24
#endif
#define NEVER 255

#define REMOTE 0     // rank 0 waits for rank 1
#define LOCAL 1      // rank 0 waits for its own block REMOTE

byte now;
byte left = SLOW;    // ticks until rank 2, later rank 1, has to have done its part
bool stuck;          // nothing more is to come from there
byte progress[3];    // of each rank, as the others have heard of it
byte told;           // last_forward_ns of rank 2
#ifdef BARRIER
byte missing = 2;    // ranks whose flag has not come; REMOTE waits until none is
#endif
bool word[2];        // what each wait waits for
byte looked[2], alive[2], last_sign[2];  // patience
bool waits[2];       // the wait is not over yet
bool gave_up[2];
bool aborted;

#ifdef STARVED
#define SLACK 2
#else
#define SLACK 1
#endif
#ifdef STOPS
bool stopped, continued;  // rank 0, all of it: SIGSTOP, SIGCONT
#define runs (!stopped)
#else
#define runs true
#endif
#define on_time(w) (!waits[w] || !runs || now - looked[w] < SLACK)
#ifdef LATE
#define in_time true
#else
#define in_time (stuck || left > 0)
#endif

active proctype clock() {
#ifdef PAUSE
    bool paused;
#endif
end:
    do
    :: d_step {
            (waits[REMOTE] || waits[LOCAL]) && now < END && in_time && on_time(REMOTE) && on_time(LOCAL) ->
            now++;
#ifdef STUCK
            assert(now < END);  // every wait ends
#endif
            if
            :: left > 0 && !stuck -> left--
            :: else
            fi
        }
#ifdef STOPS
    :: d_step { !stopped && !continued -> stopped = true }
    :: d_step { stopped -> stopped = false; continued = true }
#endif
#ifdef PAUSE
    :: d_step { !paused && now < END / 2 -> paused = true; now = now + END / 2 }  // nobody runs; what is under way stays so
#endif
    od
}

// protocol::note_progress: peers hear of progress at most once per tick, so a quick item may pass unheard.
#define note_progress() \
    if \
    :: now > told -> progress[2]++; told = now \
    :: else \
    fi

// Rank 2 finishes items; the last one lets rank 1 finish its own, without which rank 0 cannot go on.
active proctype others() {
    byte item;
    do
    :: d_step { item < ITEMS -> item++; left = SLOW; note_progress() }
    :: d_step { item == ITEMS -> item++; word[REMOTE] = true; stuck = true } -> break
#ifdef STUCK
    :: d_step { item <= ITEMS -> stuck = true; left = NEVER } -> break
#endif
#ifdef BARRIER
    :: d_step { item == ITEMS && missing == 2 -> missing = 1 }  // rank 2 arrives
#endif
    od
}

// protocol::signs_of_life
#if defined(OWN_PROGRESS_ONLY)
#define sign_of(w) ((w) == LOCAL -> progress[0] : progress[0] + progress[1] + progress[2])
#elif defined(PRODUCER_ONLY)
#define sign_of(w) ((w) == REMOTE -> progress[1] : progress[0] + progress[1] + progress[2])
#elif defined(SIGNS_CANCEL)
#define sign_of(w) (progress[0] + progress[1] + progress[2] + missing)
#elif defined(BARRIER)
#define sign_of(w) (progress[0] + progress[1] + progress[2] + 2 - missing)
#else
#define sign_of(w) (progress[0] + progress[1] + progress[2])
#endif

#if defined(NO_GRACE)
#define limit(w) LIMIT
#else
#define limit(w) ((w) == LOCAL -> LIMIT + GRACE : LIMIT)
#endif

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

// protocol::spin_until
proctype wait(byte w) {
    byte sign;
    bool over, ended;
    do
    :: word[w] && runs -> break
    :: d_step { !word[w] && runs && looked[w] != now -> sign = sign_of(w) };
        d_step {
            runs;
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
                assert(!word[w]);  // the word has the last say
#if !defined(STUCK) && !defined(LATE)
                assert(false);     // a wait ran out although everybody was at work
#endif
#ifndef STARVED
                assert(w != LOCAL || gave_up[REMOTE] || word[REMOTE] || aborted);
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
        runs;
        if
        :: w == REMOTE && word[w] -> word[LOCAL] = true; progress[0]++
        :: else
        fi;
        waits[w] = false;
        ended = false
    }
}

init {
    atomic {
        waits[REMOTE] = true;
        waits[LOCAL] = true;
        run wait(REMOTE);
        run wait(LOCAL)
    }
}
