// Two ranks, each with blocks that start in one role and join the next when its list is used up: send -> place -> compute ->
// combine -> reduce. Memory is strong here (election.pml and ring.pml look at its order); this is about who waits for whom.
//
//@ holds two_ranks -DNO_PLACE_BLOCK -DNO_COMBINE_BLOCK -DROW_BLOCKS=2 | both ranks whole; without ring pressure no block has to start in combine
//@ holds with_ring -DPEER | four row blocks in two ring entries; the other rank is reduced to what this one sees of it
//@ holds two_compute_blocks -DPEER -DTWO_COMPUTE -DNO_PLACE_BLOCK
//@ holds sender_places -DPEER -DNO_PLACE_BLOCK | send never waits, so its block reaches place in any case
//@ refuted NO_COMPUTE_BLOCK deadlock | no block starts in compute: all of them wait in place for the ring
//@ refuted NO_COMBINE_BLOCK deadlock | no block starts in combine: nobody frees ring entries
//@ refuted SEND_LAST deadlock | blocks send after they have computed and combined
//@ refuted REDUCE_BEFORE_COMBINE deadlock | blocks wait for the other rank's results before they give their own
//@ refuted TASKS_REVERSED deadlock | tasks are handed out last first
//@ refuted TAKE_NOT_ATOMIC assertion -DPEER | an item is taken by load, add, store

#ifndef ROW_BLOCKS
#define ROW_BLOCKS 4
#endif
#define ENTRIES 2
#define TASKS (2 * ROW_BLOCKS)
#define CHUNKS ((ROW_BLOCKS + 1) / 2)  // even row blocks hold rows of the other rank, odd ones this rank's

#define OTHER (1 - r)
#define AT(r, b) ((r) * ROW_BLOCKS + (b))

mtype = { send, place, compute, combine, reduce };

byte next_send[2], next_place[2], next_compute[2], next_combine[2], next_reduce[2];  // role_lists of each rank
bool sent[2 * ROW_BLOCKS];      // at the receiver: the row of block b has come
byte gathered[2 * ENTRIES];     // row block whose row is in the entry, plus one
bool arrived[2 * ROW_BLOCKS], l1_done[2 * ROW_BLOCKS], l2_done[2 * ROW_BLOCKS], freed[2 * ROW_BLOCKS];
byte planes[2];                 // at the receiver: partial rows from the other rank
byte own_planes[2];
bool combined[2], own_combined[2];

// protocol::dispenser::take
#ifdef TAKE_NOT_ATOMIC
#define take(list, count) list[r] < count -> item = list[r]; list[r] = item + 1
#else
#define take(list, count) d_step { list[r] < count -> item = list[r]; list[r]++ }
#endif
#define used_up(list, count) d_step { list[r] >= count -> item = 0 }

inline do_send() {
    do
    :: d_step {
            next_send[r] < CHUNKS ->  // never waits, so taking and sending are one step
            sent[AT(OTHER, 2 * next_send[r])] = true;
            next_send[r]++
        }
    :: next_send[r] >= CHUNKS -> break
    od
}

inline do_place() {
    do
    :: take(next_place, ROW_BLOCKS);
        d_step {
            (item % 2 == 1 || sent[AT(r, item)]) && (item < ENTRIES || freed[AT(r, item - ENTRIES)]) ->
            assert(!arrived[AT(r, item)]);
            gathered[r * ENTRIES + item % ENTRIES] = item + 1;
            arrived[AT(r, item)] = true
        }
    :: used_up(next_place, ROW_BLOCKS) -> break
    od
}

// Task order for warm-up 1: L1(0) L1(1) L2(0) L1(2) L2(1) ... L2(last)
#ifdef TASKS_REVERSED
#define TASK(i) (TASKS - 1 - (i))
#else
#define TASK(i) (i)
#endif
#define IS_L2(i) (TASK(i) == TASKS - 1 || (TASK(i) > 0 && TASK(i) % 2 == 0))
#define BLOCK_OF(i) ((TASK(i) + 1) / 2 - IS_L2(i) + (TASK(i) == TASKS - 1) * (ROW_BLOCKS - 1 - (TASK(i) + 1) / 2 + IS_L2(i)))

inline do_compute() {
    do
    :: take(next_compute, TASKS);
        if
        :: d_step {
                !IS_L2(item) && arrived[AT(r, BLOCK_OF(item))] ->
                assert(gathered[r * ENTRIES + BLOCK_OF(item) % ENTRIES] == BLOCK_OF(item) + 1);
                l1_done[AT(r, BLOCK_OF(item))] = true
            }
        :: d_step {
                IS_L2(item) && l1_done[AT(r, BLOCK_OF(item))] ->
                assert(!l2_done[AT(r, BLOCK_OF(item))]);
                l2_done[AT(r, BLOCK_OF(item))] = true
            }
        fi
    :: used_up(next_compute, TASKS) -> break
    od
}

inline do_combine() {
    do
    :: take(next_combine, ROW_BLOCKS);
        d_step {
            l2_done[AT(r, item)] ->
            assert(!freed[AT(r, item)] && gathered[r * ENTRIES + item % ENTRIES] == item + 1);
            freed[AT(r, item)] = true;
            if
            :: item % 2 == 0 -> planes[OTHER]++; combined[OTHER] = planes[OTHER] == CHUNKS
            :: else -> own_planes[r]++; own_combined[r] = own_planes[r] == ROW_BLOCKS / 2
            fi
        }
    :: used_up(next_combine, ROW_BLOCKS) -> break
    od
}

inline do_reduce() {
    do
    :: take(next_reduce, 1);
        own_combined[r] && combined[r];
        assert(planes[r] == CHUNKS && own_planes[r] == ROW_BLOCKS / 2)
    :: used_up(next_reduce, 1) -> break
    od
}

// patterns::walk_roles
proctype block(bit r; mtype first) {
    byte item;
#if defined(SEND_LAST)
    do_place();
    do_compute();
    do_combine();
    do_send();
    do_reduce()
#else
    if
    :: first == send -> do_send()
    :: else
    fi;
    if
    :: first == send || first == place -> do_place()
    :: else
    fi;
    if
    :: first == send || first == place || first == compute -> do_compute()
    :: else
    fi;
#ifdef REDUCE_BEFORE_COMBINE
    do_reduce();
    do_combine()
#else
    do_combine();
    do_reduce()
#endif
#endif
}

// patterns::starting_roles
inline start(r) {
    run block(r, send);
#ifndef NO_PLACE_BLOCK
    run block(r, place);
#endif
#ifndef NO_COMPUTE_BLOCK
    run block(r, compute);
#ifdef TWO_COMPUTE
    run block(r, compute);
#endif
#endif
#ifndef NO_COMBINE_BLOCK
    run block(r, combine)
#endif
}

// What rank 0 sees of rank 1: its rows come at any time, since send waits for nobody; its results once it has all rows.
proctype peer() {
    byte chunk;
    do
    :: d_step { chunk < CHUNKS -> sent[AT(0, 2 * chunk)] = true; chunk++ }
    :: chunk == CHUNKS -> break
    od;
    sent[AT(1, 0)] && sent[AT(1, 2 * (CHUNKS - 1))];
    d_step { planes[0] = CHUNKS; combined[0] = true }
}

#ifdef PEER
init { atomic { start(0); run peer() } }
#else
init { atomic { start(0); start(1) } }
#endif
