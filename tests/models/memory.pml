// Memory between ranks (and, where a model says so, between blocks of one rank). Included by models that define
//   LOCS      number of locations; a location has one writing rank and is read in the memory of its owner
//   BLOCKS    number of processes that write
//   COUNTERS  number of local counters that are read-modify-written (0: none)
// and, before the include, LOCAL_LOCS: the set of locations that are read by blocks of the rank that writes them.
//
// A write takes off at once and lands at any later time, in any order. Only what a release names keeps an order:
//   put       a plain store: lands whenever it likes
//   signal    st.release.sys, or fence.sys and st: lands after every write that happened before it
//   give      the release half of atom.acq_rel on a local counter: whoever takes from the counter speaks for these writes too
//   take      the acquire half: what was given happened before; local data among it can be read from here on
// A landed write needs no bookkeeping any more, so all sets below hold only writes that are still in flight.

#define BIT(l) (1 << (l))

byte mem[LOCS];        // what the owner of a location reads
byte flying[LOCS];     // the value that is on its way there
int in_flight;         // set of the locations with a write on its way
int after[LOCS];       // set of the writes that must land before this one
int before[BLOCKS];    // set of the writes that happened before whatever the block does next
#if COUNTERS > 0
int given[COUNTERS];   // set of the writes that happened before the additions to a counter
#endif

hidden byte idx_;

inline land(l) {
    mem[l] = flying[l];
    flying[l] = 0;
    in_flight = in_flight & ~BIT(l);
    after[l] = 0;
    idx_ = 0;
    do
    :: idx_ < LOCS -> after[idx_] = after[idx_] & ~BIT(l); idx_++
    :: else -> break
    od;
    idx_ = 0;
    do
    :: idx_ < BLOCKS -> before[idx_] = before[idx_] & ~BIT(l); idx_++
    :: else -> break
    od;
#if COUNTERS > 0
    idx_ = 0;
    do
    :: idx_ < COUNTERS -> given[idx_] = given[idx_] & ~BIT(l); idx_++
    :: else -> break
    od;
#endif
    idx_ = 0
}

// A second write to a location waits until the first has landed: stores of one writer to one address keep their order.
inline put(b, l, v) {
    d_step {
        !(in_flight & BIT(l));
        flying[l] = v;
        in_flight = in_flight | BIT(l);
        before[b] = before[b] | BIT(l)
    }
}

inline signal(b, l, v) {
    d_step {
        !(in_flight & BIT(l));
        flying[l] = v;
        after[l] = before[b];
        in_flight = in_flight | BIT(l);
        before[b] = before[b] | BIT(l)
    }
}

#define give(b, c) given[c] = given[c] | before[b]
#define take(b, c) before[b] = before[b] | given[c]
// True when everything local that was given to the counter can be read: an acquire that reads the counter sees it.
#define can_read(c) ((given[c] & LOCAL_LOCS) == 0)

#define LANDS(l) :: d_step { (in_flight & BIT(l)) && !(after[l] & in_flight) -> land(l) }

active proctype network() {
end:
    do
    LANDS(0)
#if LOCS > 1
    LANDS(1)
#endif
#if LOCS > 2
    LANDS(2)
#endif
#if LOCS > 3
    LANDS(3)
#endif
#if LOCS > 4
    LANDS(4)
#endif
#if LOCS > 5
    LANDS(5)
#endif
#if LOCS > 6
    LANDS(6)
#endif
#if LOCS > 7
    LANDS(7)
#endif
#if LOCS > 8
    LANDS(8)
#endif
#if LOCS > 9
    LANDS(9)
#endif
#if LOCS > 10
    LANDS(10)
#endif
#if LOCS > 11
    LANDS(11)
#endif
#if LOCS > 12
    LANDS(12)
#endif
#if LOCS > 13
    LANDS(13)
#endif
#if LOCS > 14
    LANDS(14)
#endif
#if LOCS > 15
    LANDS(15)
#endif
#if LOCS > 16
    LANDS(16)
#endif
#if LOCS > 17
    LANDS(17)
#endif
    od
}
