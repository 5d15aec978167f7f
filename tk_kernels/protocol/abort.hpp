// How a wait that failed ends the call everywhere: a record of who waited for what, then the abort flag, at every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "context.hpp"

namespace moe_tk::protocol {

// A record is moved word by word. Its word `kind` holds kind + version << 8 while it lies in a control block: a reader takes
// the record only if it finds the same kind and version behind it as before it.
constexpr int RECORD_WORDS = sizeof(wait_record) / 4, KIND_WORD = offsetof(wait_record, kind) / 4, VERSION_SHIFT = 8;

MOE_TK_FN uint32_t *record_words(control_block *block, int from) { return reinterpret_cast<uint32_t *>(&block->records[from]); }

// Writes this rank's wait record at every rank. By one thread at a time; a later record replaces an earlier one.
// ORDER record: takes the old kind away, then stores the words, then releases the new kind; pairs with read_record.
MOE_TK_FN void write_record(const wait_context &context, const wait_record &record) {
    uint32_t words[RECORD_WORDS];
    memcpy(words, &record, sizeof(record));
    const uint32_t before = platform::load_relaxed<scope::system>(record_words(context.own, context.rank) + KIND_WORD);
    const uint32_t version = (before >> VERSION_SHIFT) + 1;
    for (int to = 0; to < context.world; ++to) {
        uint32_t *slot = record_words(control_of(context, to), context.rank);
        platform::store_relaxed<scope::system>(slot + KIND_WORD, version << VERSION_SHIFT);
        platform::fence<scope::system>();
        for (int i = 0; i < RECORD_WORDS; ++i) {
            if (i != KIND_WORD) platform::store_relaxed<scope::system>(slot + i, words[i]);
        }
        platform::store_release<scope::system>(slot + KIND_WORD, version << VERSION_SHIFT | record.kind);
    }
}

// Once per workspace life: the first block that gives up speaks for all, until close_record.
MOE_TK_FN bool file_record(const wait_context &context, const wait_record &record) {
    if (platform::exchange_acq_rel<scope::device>(context.record_claim, 1u) != 0) return false;
    write_record(context, record);
    return true;
}

// The record that rank `from` filed here; false while there is none, or none that holds still.
// ORDER record: acquires the kind, reads the words, and looks at the kind again behind a fence.
MOE_TK_FN bool read_record(control_block *own, int from, wait_record &record) {
    const uint32_t *slot = record_words(own, from);
    uint32_t words[RECORD_WORDS];
    for (int tries = 0; tries < 64; ++tries) {
        const uint32_t kind = platform::load_acquire<scope::system>(slot + KIND_WORD);
        if (kind == 0) return false;
        for (int i = 0; i < RECORD_WORDS; ++i) words[i] = platform::load_relaxed<scope::system>(slot + i);
        platform::fence<scope::system>();
        const bool whole = platform::load_relaxed<scope::system>(slot + KIND_WORD) == kind;
        words[KIND_WORD] = kind & ((1u << VERSION_SHIFT) - 1);
        if (!whole || words[KIND_WORD] == 0) continue;
        memcpy(&record, words, sizeof(record));
        return true;
    }
    return false;
}

// Tells every rank, this one last: if this process dies half-way, whoever was told passes it on, for a rank that is told
// gives up too. The stores of different ranks only overwrite one cause by another; the records say who and why.
MOE_TK_FN void raise_abort(const wait_context &context, abort_kind kind) {
    for (int distance = 1; distance <= context.world; ++distance) {
        const int to = (context.rank + distance) % context.world;
        const abort_kind told = to == context.rank ? kind : abort_kind::told_by_peer;
        platform::store_release<scope::system>(&control_of(context, to)->abort_flag, uint32_t(told));
    }
}

// Gives up a wait: files who waited for what and tells everybody. A block that is told while it waits for its own rank has
// nothing to say that helps: it leaves the word to a block that waits for another rank, and at last to close_record.
MOE_TK_FN void give_up(const wait_context &context, const wait_site &site, uint32_t want, uint32_t seen, uint64_t waited_ns,
                       uint64_t missing, abort_kind kind) {
    wait_record record{.site = site, .expected = want, .seen = seen, .kind = uint32_t(kind), .epoch = call_epoch(context),
                       .waited_ns = waited_ns, .missing = missing};
    record.site.rank = context.rank;
    if (context.block_records && site.block >= 0 && site.block < context.num_blocks) {
        context.block_records[site.block] = record;
        if (kind == abort_kind::told_by_peer && missing == 0) return;
    }
    if (file_record(context, record)) raise_abort(context, kind);
}

// Files the final record of a launch that failed, when none of its blocks runs any more: it names all ranks that any of them
// waited for, so that the chains of all ranks end at the one that is to blame. A rank whose blocks were at work when they
// were told says just that: phase none, nobody missing.
MOE_TK_FN void close_record(const wait_context &context, op_id op) {
    wait_record last{.site = {.op = op, .rank = context.rank}, .kind = uint32_t(abort_kind::told_by_peer),
                     .epoch = call_epoch(context)};
    uint64_t missing = 0;
    int weight = -1;
    for (int block = 0; block < context.num_blocks; ++block) {
        const wait_record &record = context.block_records[block];
        if (record.kind == uint32_t(abort_kind::none)) continue;
        missing |= record.missing;
        const int told = record.kind == uint32_t(abort_kind::told_by_peer), lost = record.kind == uint32_t(abort_kind::peer_lost);
        const int says = (record.missing ? 4 : 0) + (lost ? 2 : told ? 0 : 1);
        if (says > weight) { weight = says; last = record; }
    }
    last.missing = missing;
    platform::store_relaxed<scope::device>(context.record_claim, 1u);
    write_record(context, last);
    raise_abort(context, abort_kind(last.kind));
}

}  // namespace moe_tk::protocol
