// One rank of mega: the task list interleaves Linear 1 of row block b with Linear 2 of row block b - warmup, and row blocks live
// in a ring. Segments have any number of row blocks up to SEGMENT; every row of a segment has a slot in each of its row blocks,
// the worst case: a row that waits for an entry keeps the rows behind it from being placed, and an entry is free when the whole
// segment of its row block is combined. Memory is strong here (see ring.pml).
//
//@ holds warmup_1 -DWARMUP=1 -DENTRIES=4 -DCOMPUTE=2 | ring - 2 segments + 1: the largest that Geometry.max_warmup allows
//@ holds warmup_2 -DWARMUP=2 -DENTRIES=5 -DCOMPUTE=1 | the same, one compute block
//@ holds two_columns -DWARMUP=2 -DENTRIES=5 -DCOMPUTE=2 -DCOLUMNS=2 -DROW_BLOCKS=6
//@ holds two_placers -DWARMUP=1 -DENTRIES=4 -DCOMPUTE=1 -DPLACERS=2 -DROWS=3
//@ holds segments_of_3 -DWARMUP=2 -DSEGMENT=3 -DENTRIES=7 -DROW_BLOCKS=8 -DCOMPUTE=1
//@ holds whole_pool -DWARMUP=6 -DENTRIES=6 -DCOMPUTE=2 | no ring: any warm-up will do
//@ holds warmup_0 -DWARMUP=0 -DENTRIES=3 -DCOMPUTE=2 | slow, but no deadlock for an engine that publishes a tile before it takes the next task
//@ holds holding_engine -DWARMUP=1 -DENTRIES=5 -DCOMPUTE=1 -DHOLD | an engine that keeps its last tile back until it is past the next gate
//@ holds polite_engine -DWARMUP=1 -DENTRIES=4 -DROW_BLOCKS=5 -DCOMPUTE=2 -DHOLD -DTRY_FIRST | the same, but it publishes before it waits
//@ holds polite_engine_warmup_0 -DWARMUP=0 -DENTRIES=3 -DROW_BLOCKS=5 -DCOMPUTE=2 -DHOLD -DTRY_FIRST
//@ refuted WARMUP_TOO_LARGE deadlock | ring - 2 segments + 2
//@ refuted WARMUP_RING_LESS_SEGMENT deadlock | ring - segment: enough if a row waited alone, but it holds up the rows behind it
//@ refuted RING_OF_ONE_SEGMENT deadlock | one segment to fill, none to combine meanwhile
//@ refuted RING_BELOW_SEGMENT deadlock | jobs wait for row blocks that find no entry
//@ refuted WARMUP_0 deadlock | warm-up 0 and an engine that keeps its last tile back
//@ refuted HOLDS_AT_THE_LIMIT deadlock | the largest warm-up and an engine that keeps its last tile back
//@ refuted HOLDS_TWO_BLOCKS deadlock | warm-up 1, two compute blocks that keep their last tile back
//@ refuted TASKS_UNORDERED deadlock | all Linear 1 before all Linear 2, in a ring

#if defined(WARMUP_TOO_LARGE)
#define WARMUP 2
#define ENTRIES 4
#elif defined(WARMUP_RING_LESS_SEGMENT)
#define WARMUP 3
#define SEGMENT 3
#define ENTRIES 6
#define ROW_BLOCKS 9
#elif defined(RING_OF_ONE_SEGMENT)
#define WARMUP 1
#define ENTRIES 2
#elif defined(RING_BELOW_SEGMENT)
#define WARMUP 1
#define ENTRIES 1
#elif defined(WARMUP_0)
#define WARMUP 0
#define ENTRIES 4
#define HOLD
#elif defined(HOLDS_AT_THE_LIMIT)
#define WARMUP 2
#define ENTRIES 5
#define HOLD
#elif defined(HOLDS_TWO_BLOCKS)
#define WARMUP 1
#define ENTRIES 5
#define COMPUTE 2
#define HOLD
#elif defined(TASKS_UNORDERED)
#define WARMUP 6
#define ENTRIES 4
#endif

#ifndef SEGMENT
#define SEGMENT 2
#endif
#ifndef ROW_BLOCKS
#define ROW_BLOCKS 6
#endif
#ifndef ROWS
#define ROWS 2       // rows of each segment
#endif
#ifndef COLUMNS
#define COLUMNS 1    // column blocks of either GEMM
#endif
#ifndef COMPUTE
#define COMPUTE 1
#endif
#ifndef PLACERS
#define PLACERS 1
#endif
#define TASKS (2 * ROW_BLOCKS * COLUMNS)
#define ENTRY(b) ((b) % ENTRIES)
#define NOTHING 255

hidden byte task_block[TASKS];   // written once, before anything runs
hidden byte task_second[TASKS];

short starts;                    // set of the row blocks that begin a segment
#define begins(b) ((b) >= ROW_BLOCKS || (starts & (1 << (b))))

byte next_block, next_row;       // of place: first row block of the segment, row in it
byte next_task;
byte gathered[ENTRIES], expert_out[ENTRIES];  // row block that the entry holds, plus one
byte arrived[ROW_BLOCKS], freed[ROW_BLOCKS];
byte l1_done[ROW_BLOCKS], l2_done[ROW_BLOCKS];

// moe_tk.schedule.orders.mega_order
inline make_tasks() {
    d_step {
        b = 0;
        do
        :: b < ROW_BLOCKS + WARMUP ->
            c = 0;
            do
            :: c < COLUMNS && b < ROW_BLOCKS -> task_block[i] = b; task_second[i] = 0; i++; c++
            :: else -> break
            od;
            c = 0;
            do
            :: c < COLUMNS && b >= WARMUP -> task_block[i] = b - WARMUP; task_second[i] = 1; i++; c++
            :: else -> break
            od;
            b++
        :: else -> break
        od;
        assert(i == TASKS);
        b = 0;
        c = 0;
        i = 0
    }
}

// Any split of the row blocks into segments of at most SEGMENT.
inline make_segments() {
    do
    :: b < ROW_BLOCKS && c < SEGMENT && b > 0 -> b++; c++
    :: b < ROW_BLOCKS -> starts = starts | (1 << b); b++; c = 1
    :: b >= ROW_BLOCKS -> break
    od;
    b = 0;
    c = 0
}

// roles::place_rows: rows in delivery order, each into its slots one after the other
proctype place() {
    byte b;
    do
    :: d_step {
            next_block < ROW_BLOCKS ->
            b = next_block;
            next_row++;
            if
            :: next_row == ROWS ->
                next_row = 0;
                next_block++;
                do
                :: !begins(next_block) -> next_block++
                :: else -> break
                od
            :: else
            fi
        };
        do
        :: d_step {
                b < ENTRIES || freed[b - ENTRIES] == ROWS ->  // ring_pool::wait_free
                gathered[ENTRY(b)] = b + 1;
                arrived[b]++;
                b++
            };
            if
            :: begins(b) -> break
            :: else
            fi
        od;
        b = 0
    :: next_block >= ROW_BLOCKS -> break
    od
}

#define is_open(t) (task_second[t] == 1 -> l1_done[task_block[t]] == COLUMNS : arrived[task_block[t]] == ROWS)

// the GEMM and its epilogue's store
#define multiply(t) \
    assert(gathered[ENTRY(task_block[t])] == task_block[t] + 1); \
    if \
    :: task_second[t] == 1 -> expert_out[ENTRY(task_block[t])] = task_block[t] + 1 \
    :: else \
    fi

// count_push
#define publish(t) \
    if \
    :: t == NOTHING \
    :: t != NOTHING && task_second[t] == 0 -> l1_done[task_block[t]]++ \
    :: t != NOTHING && task_second[t] == 1 -> l2_done[task_block[t]]++ \
    fi; \
    t = NOTHING

// roles::compute_tiles
proctype compute() {
    byte task = NOTHING;
#ifdef HOLD
    byte held = NOTHING;
    do
    :: d_step { next_task < TASKS -> task = next_task; next_task++ };
#ifdef TRY_FIRST
        d_step {
            if
            :: is_open(task)
            :: else -> publish(held)
            fi
        };
#endif
        d_step { is_open(task) -> multiply(task) };
        d_step { publish(held); held = task; task = NOTHING }
    :: next_task == TASKS -> break
    od;
    skip;
    d_step { publish(held) }
#else
    do
    :: d_step { next_task < TASKS -> task = next_task; next_task++ };
        d_step { is_open(task) -> multiply(task); publish(task) }
    :: next_task == TASKS -> break
    od
#endif
}

// roles::combine_jobs: a job reads its row block of each slot as it is computed, and frees the entries at the end
proctype combine() {
    byte first, b, row;
    do
    :: d_step {
            first < ROW_BLOCKS && l2_done[b] == COLUMNS ->
            assert(expert_out[ENTRY(b)] == b + 1);
            b++
        };
        if
        :: !begins(b)
        :: d_step {
                begins(b) ->
                b = first;
                do
                :: freed[b]++;
                    b++;
                    if
                    :: begins(b) -> break
                    :: else
                    fi
                od;
                row++;
                if
                :: row == ROWS -> row = 0; first = b
                :: else -> b = first
                fi
            }
        fi
    :: first >= ROW_BLOCKS -> break
    od
}

init {
    byte b, c, i;
    make_tasks();
    make_segments();
    atomic {
        run place();
#if PLACERS > 1
        run place();
#endif
        run compute();
#if COMPUTE > 1
        run compute();
#endif
        run combine()
    }
}
