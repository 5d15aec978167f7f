// The list of combine_and_reduce over NVLink: two ranks, whose warps take jobs (sums for the other rank, which wait for this GPU's
// tiles) and own tokens (which wait for the other rank's watermark) from one list each: all jobs by column group, then all tokens.
// Ranks may cut their work differently, and one of them may run the serial pattern. Memory is strong here: election
// and watermark are in the model election.
//
//@ holds one_warp -DWARPS=1
//@ holds two_warps
//@ holds other_cuts -DOTHER_CUTS | rank 0 takes half a job at a time, rank 1 two jobs
//@ holds serial_rank -DOTHER_CUTS -DSERIAL | rank 1 runs the serial pattern, where no tiles are waited for
//@ holds fails -DGROUPS=2 -DFAULT -DWARPS=1 | once some wait is given up, by its time or by the host
//@ holds fails_other_cuts -DGROUPS=2 -DFAULT -DOTHER_CUTS -DWARPS=1
//@ holds dies -DGROUPS=2 -DDEATH -DWARPS=1 | rank 1 is lost at any time
//@ refuted TOKENS_FIRST deadlock -DWARPS=1 | the tokens of a group stand before its jobs, and there are no more warps than such tokens
//@ refuted DEAF deadlock -DGROUPS=2 -DFAULT -DWARPS=1 | waits do not look at the abort flag
//@ refuted NO_REPORT assertion -DGROUPS=2 -DFAULT -DWARPS=1 | a token becomes NaN because of another rank, and the host of this one does not hear of it | KRN-11
//@ refuted NO_REPORT_AT_END assertion -DGROUPS=2 -DFAULT -DWARPS=1 | the same where it was told before it began | KRN-11
//@ refuted FLAG_NOT_SEEN assertion -DGROUPS=2 -DFAULT -DWARPS=1 | a rank that gave up in gather_gemm does not look at its flag before it combines, and its peer not before it adds | KRN-11
//@ refuted COUNTED_BY_ITEMS deadlock -DOTHER_CUTS | the last item of a chunk is found by counting items, not jobs times slices

#ifndef GROUPS
#define GROUPS 4
#endif
#ifndef WARPS
#define WARPS 2
#endif
#define OTHER (1 - r)
#define AT(r, g) ((r) * GROUPS + (g))

// Each group has its jobs and tokens in one chunk
#ifdef OTHER_CUTS
#define JOB_ITEMS(r) ((r) == 0 -> 2 : 1)    // rank 0: one job in two slices; rank 1: two jobs in one batch
#define ADDS(r) ((r) == 0 -> 1 : 2)
#define EXPECTED(r) 2
#define TOKEN_ITEMS(r) ((r) == 0 -> 2 : 1)
#else
#define JOB_ITEMS(r) 1
#define ADDS(r) 1
#define EXPECTED(r) 1
#define TOKEN_ITEMS(r) 1
#endif
#define SIZE(r) (GROUPS * (JOB_ITEMS(r) + TOKEN_ITEMS(r)))

#ifdef COUNTED_BY_ITEMS
#define LAST(r) JOB_ITEMS(r)
#else
#define LAST(r) EXPECTED(r)
#endif

byte next_item[2];
bool tiles[2 * GROUPS];        // l2_done: the tiles of a column group are there
byte job_done[2 * GROUPS];
bool watermark[2 * GROUPS];    // combined, at rank r, by the other
byte sent[2 * GROUPS];         // ghost: job items of rank r whose sums are in the other's planes
byte good[2], nan[2];          // ghost: token items of rank r with a result, without one
byte finished[2];              // warps
bool flag[2], host_told[2];    // abort_flag; mailbox::failed
#ifdef FAULT
bool may_fail;                 // once, or not at all
bool garbage[2];               // or a wait of gather_gemm was given up: what is made of its rows is of no use
bool gathered;                 // rank 0 may combine
bool claimed[2];
#endif
#ifdef DEATH
bool dead;                     // rank 1
bool claimed[2];
#define gone(r) (dead && (r) == 1)
#else
#define gone(r) false
#endif
#if defined(FAULT) || defined(DEATH)
#define faults true
#define STEP
#else
#define faults false
#define STEP atomic  // but for its waits
#endif

// The storers of gemm_scatter, whatever the others do
proctype gemm2(bit r) {
    byte g;
    do
    :: g < GROUPS && !gone(r) -> tiles[AT(r, g)] = true; g++
    :: g == GROUPS || gone(r) -> break
    od
}

inline give_up() {
#if defined(FAULT) || defined(DEATH)
    if
    :: d_step { !claimed[r] -> claimed[r] = true };
        flag[OTHER] = true;
        flag[r] = true;
        host_told[r] = true
    :: claimed[r] -> flag[r] || gone(r)
    fi;
#endif
    ok = false
}

// nvlink::spin_until, for what the other rank does or for what this one does
inline wait_for(word, remote) {
    if
    :: word && !gone(r)
#if defined(FAULT) && !defined(DEAF)
    :: !(word) && flag[r] -> give_up()
#endif
#ifdef FAULT
    :: d_step { !(word) && may_fail -> may_fail = false }; give_up()
#endif
#ifdef DEATH
    :: !(word) && flag[r] && !gone(r) -> give_up()
    :: !(word) && remote && dead && !gone(r) -> give_up()
    :: gone(r)
#endif
    fi
}

// take_item and work_list::at
inline next_place() {
    d_step {
        item = next_item[r]; next_item[r]++;
        left = item; g = 0; is_job = true;
        do
        :: item >= SIZE(r) -> break
#ifdef TOKENS_FIRST
        :: item < SIZE(r) && left < TOKEN_ITEMS(r) -> is_job = false; break
        :: item < SIZE(r) && left >= TOKEN_ITEMS(r) && left < TOKEN_ITEMS(r) + JOB_ITEMS(r) -> break
        :: item < SIZE(r) && left >= TOKEN_ITEMS(r) + JOB_ITEMS(r) -> left = left - TOKEN_ITEMS(r) - JOB_ITEMS(r); g++
#else
        // all jobs group by group, then all tokens
        :: item < SIZE(r) && is_job && g < GROUPS && left < JOB_ITEMS(r) -> break
        :: item < SIZE(r) && is_job && g < GROUPS && left >= JOB_ITEMS(r) -> left = left - JOB_ITEMS(r); g++
        :: item < SIZE(r) && is_job && g >= GROUPS -> is_job = false; g = 0
        :: item < SIZE(r) && !is_job && left < TOKEN_ITEMS(r) -> break
        :: item < SIZE(r) && !is_job && left >= TOKEN_ITEMS(r) -> left = left - TOKEN_ITEMS(r); g++
#endif
        od;
        left = 0
    }
}

inline combine_jobs() {
    ok = true;
#ifdef SERIAL
    if
    :: r == 1
    :: r == 0 -> wait_for(tiles[AT(r, g)], false)
    fi;
#else
    wait_for(tiles[AT(r, g)], false);
#endif
    if
    :: ok && !gone(r) ->
        d_step {
            sent[AT(r, g)]++;
            job_done[AT(r, g)] = job_done[AT(r, g)] + ADDS(r);
            if
            :: job_done[AT(r, g)] == LAST(r) -> watermark[AT(OTHER, g)] = true
            :: else
            fi
        }
    :: !ok || gone(r) -> given_up = true
    fi
}

inline reduce_tokens() {
    ok = computed;
    if
    :: computed -> wait_for(watermark[AT(r, g)], true)
    :: !computed
    fi;
    if
#ifdef FLAG_NOT_SEEN
    :: ok ->
#else
    :: ok && !flag[r] ->
#endif
        assert(gone(r) || sent[AT(OTHER, g)] == JOB_ITEMS(OTHER));
#ifdef FAULT
        assert(!garbage[OTHER]);
#endif
        good[r]++
#ifdef FLAG_NOT_SEEN
    :: !ok ->
#else
    :: !ok || flag[r] ->
#endif
        nan[r]++;
#ifndef NO_REPORT
        if
        :: computed -> host_told[r] = true
        :: !computed
        fi
#endif
    fi
}

// A warp of combine_and_reduce
proctype warp(bit r) {
    byte item, g, left;
    bool is_job, ok, given_up, computed;
#ifdef FAULT
    r == 1 || gathered;
#endif
#ifdef FLAG_NOT_SEEN
    computed = true;
#else
    given_up = flag[r];
    computed = !given_up;
#endif
    do
    :: true ->
        STEP {
            next_place();
            if
            :: item >= SIZE(r) || gone(r) -> break
            :: item < SIZE(r) && !is_job && !gone(r) -> reduce_tokens()
            :: item < SIZE(r) && is_job && !given_up && !gone(r) -> combine_jobs()
            :: item < SIZE(r) && is_job && given_up && !gone(r)
            fi;
            ok = false
        }
    od;
    item = 0;
#ifndef NO_REPORT_AT_END
    if
    :: given_up -> host_told[r] = true
    :: !given_up
    fi;
#endif
    d_step { g = 0; is_job = false; given_up = false; computed = false; finished[r]++ }
}

// What the host finds when the launch is over
proctype host(bit r) {
    finished[r] == WARPS;
    assert(gone(r) || good[r] + nan[r] == GROUPS * TOKEN_ITEMS(r));
    assert(gone(r) || nan[r] == 0 || host_told[r]);
    assert(faults || nan[r] == 0)
}

#ifdef FAULT
// gather_gemm of rank 0, which ends before that rank combines
proctype gather() {
    if
    :: garbage[0] ->
        claimed[0] = true;
        flag[1] = true;
        flag[0] = true;
        host_told[0] = true
    :: !garbage[0]
    fi;
    gathered = true
}
#endif
#ifdef DEATH
proctype death() { dead = true }
#endif

init {
#ifdef FAULT
    if
    :: may_fail = true
    :: garbage[0] = true
    :: skip
    fi;
#endif
    atomic {
        run gemm2(0); run host(0); run host(1); run warp(0); run warp(1);
#ifndef SERIAL
        run gemm2(1);
#endif
#if WARPS == 2
        run warp(0); run warp(1);
#endif
#ifdef FAULT
        run gather()
#elif defined(DEATH)
        run death()
#endif
    }
}
