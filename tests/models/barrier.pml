// The start and the end of every call: wait until all ranks are over the previous call, tell all ranks about this one, learn
// from all, and say at the end that it is over. A rank may refuse its call; then nothing is launched, and all go on.
//
//@ holds three_ranks -DRANKS=3 -DCALLS=2
//@ holds refusals -DRANKS=2 -DCALLS=3 -DREFUSALS | any rank may refuse any call
//@ refuted NO_BARRIER assertion | a rank writes into its peers without waiting for the end of their previous call
//@ refuted BARRIER_WITHOUT_EPOCH assertion | a flag that says "over" but not which call
//@ refuted ARRIVES_EARLY assertion | a rank says that its call is over before its last read
//@ refuted WAITS_FOR_THIS_CALL deadlock | the barrier waits for the call that it opens
//@ refuted RELAXED_SIGNAL assertion | the release between header and flag is dropped | KRN-05
//@ refuted EPOCH_FROZEN assertion | all calls carry the epoch of the first | GRF-01
//@ refuted SKIPS_A_CALL deadlock | a rank with nothing to do does not take part | KRN-08
//@ refuted REFUSES_SILENTLY deadlock -DREFUSALS | a rank that refuses its arguments raises without telling | KRN-08
//@ refuted REFUSED_NEVER_ARRIVES deadlock -DREFUSALS | a refused call is not closed
//@ refuted REFUSED_KEEPS_EPOCH assertion -DREFUSALS | a refused call does not count for the rank that refuses
//@ refuted PCIE_COUNTING_BARRIER deadlock | ranks add to a counter at their peers over PCIe and lose increments | KRN-06

#ifndef RANKS
#define RANKS 2
#define CALLS 3
#endif
#define BLOCKS RANKS
#define COUNTERS 0
#define LOCAL_LOCS 0

#define PAIRS (RANKS * (RANKS - 1))
#define PAIR(to, from) ((to) * (RANKS - 1) + (from) - ((from) > (to)))
#define HEADER(to, from) PAIR(to, from)            // in the memory of rank `to`
#define POSTED(to, from) (PAIRS + PAIR(to, from))  // likewise
#define DONE(to, from) (2 * PAIRS + PAIR(to, from))
#ifdef REFUSALS
#define LOCS (4 * PAIRS)
#define IDS(to, from) (3 * PAIRS + PAIR(to, from)) // topk_ids, not sent by a rank that refuses
#else
#define LOCS (3 * PAIRS)
#endif
#define REFUSED 8                                  // added to the header of a refused call

#if defined(EPOCH_FROZEN)
#define EPOCH 1
#elif defined(REFUSED_KEEPS_EPOCH)
#define EPOCH (call - behind)
#else
#define EPOCH call
#endif

#include "memory.pml"

#ifdef PCIE_COUNTING_BARRIER
byte added[LOCS];  // what the writer of a counter has added, less what the wire lost
#endif

#if defined(BARRIER_WITHOUT_EPOCH)
#define over(flag) (call == 1 || mem[flag] != 0)
#elif defined(WAITS_FOR_THIS_CALL)
#define over(flag) (mem[flag] >= EPOCH)
#else
#define over(flag) (mem[flag] >= EPOCH - 1)
#endif

// protocol::arrive
inline arrive(me) {
    peer = 0;
    do
    :: peer < RANKS && peer != me ->
#ifdef PCIE_COUNTING_BARRIER
        if
        :: added[DONE(peer, me)]++
        :: skip  // the increment is lost
        fi;
        signal(me, DONE(peer, me), added[DONE(peer, me)]);
#else
        signal(me, DONE(peer, me), EPOCH);
#endif
        peer++
    :: peer == me -> peer++
    :: peer >= RANKS -> peer = 0; break
    od
}

// protocol::exchange_headers
inline post(me) {
    do
    :: peer < RANKS && peer != me ->
#ifdef REFUSALS
        if
        :: !refused -> put(me, IDS(peer, me), call)
        :: else
        fi;
#endif
        put(me, HEADER(peer, me), call + refused * REFUSED);
#ifdef RELAXED_SIGNAL
        put(me, POSTED(peer, me), EPOCH);
#else
        signal(me, POSTED(peer, me), EPOCH);
#endif
        peer++
    :: peer == me -> peer++
    :: peer >= RANKS -> peer = 0; break
    od
}

inline wait_for_all(me, condition) {
    do
    :: peer < RANKS && peer != me -> condition; peer++
    :: peer == me -> peer++
    :: peer >= RANKS -> peer = 0; break
    od
}

// what the call does with the headers and with the routing of the others
inline read_headers(me) {
    do
    :: peer < RANKS && peer != me ->
        assert(mem[HEADER(me, peer)] == call || mem[HEADER(me, peer)] == call + REFUSED);
        void_call = void_call || mem[HEADER(me, peer)] >= REFUSED;
        peer++
    :: peer == me -> peer++
    :: peer >= RANKS -> peer = 0; break
    od
}

inline read_routing(me) {
#ifdef REFUSALS
    do
    :: peer < RANKS && peer != me -> assert(void_call || mem[IDS(me, peer)] == call); peer++
    :: peer == me -> peer++
    :: peer >= RANKS -> peer = 0; break
    od
#else
    skip
#endif
}

// Session.open_call, launch, and what closes the call
proctype rank(byte me) {
    byte call = 1, peer;
#ifdef REFUSED_KEEPS_EPOCH
    byte behind;
#endif
    bool refused, void_call;
    do
    :: call <= CALLS ->
#ifdef SKIPS_A_CALL
        if
        :: me == 0 && call == 2 -> call++
        :: else
        fi;
#endif
#ifdef REFUSALS
        if
        :: refused = true
        :: refused = false
        fi;
#ifdef REFUSES_SILENTLY
        if
        :: refused -> call++; goto next
        :: else
        fi;
#endif
#endif
#ifndef NO_BARRIER
        wait_for_all(me, over(DONE(me, peer)));
#endif
        post(me);
        wait_for_all(me, mem[POSTED(me, peer)] >= EPOCH);
        void_call = refused;
#ifdef ARRIVES_EARLY
        arrive(me);
#endif
        read_headers(me);
        read_routing(me);
#ifdef REFUSED_NEVER_ARRIVES
        if
        :: !void_call -> arrive(me)
        :: else
        fi;
#elif !defined(ARRIVES_EARLY)
        arrive(me);
#endif
#ifdef REFUSED_KEEPS_EPOCH
        behind = behind + refused;
#endif
        call++;
#ifdef REFUSES_SILENTLY
next:
#endif
        refused = false;
        void_call = false
    :: else -> break
    od
}

init {
    atomic {
        run rank(0);
        run rank(1);
#if RANKS > 2
        run rank(2);
#endif
    }
}
