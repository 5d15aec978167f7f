// The schedule tables of one rank as plain loops over docs/schedule.md (EP), for the native tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tk_kernels/patterns/globals.hpp"

namespace native {

using moe_tk::patterns::schedule_view;

// Sizes of a test world. The row stride of the tables is max_tokens.
struct shape {
    int world = 3;
    int64_t max_tokens = 8, top_k = 2, num_experts = 5;
    int64_t hidden = 8, intermediate = 8;
    int64_t row_block = 2, column_block = 4, segments = 2;
    int64_t send_chunk = 2, job_chunk = 2;

    int64_t chunks_of(int64_t size) const { return std::max<int64_t>(1, (max_tokens + size - 1) / size); }
    int64_t first_expert(int rank) const {
        const int64_t each = num_experts / world, more = num_experts % world;
        return rank * each + std::min<int64_t>(rank, more);
    }
    int64_t experts_of(int rank) const { return first_expert(rank + 1) - first_expert(rank); }
    int64_t max_blocks() const { return world * max_tokens * top_k; }  // a block holds one row at least
};

// The routing of all ranks: what every rank knows after the exchange.
struct routing {
    std::vector<int64_t> counts;      // [R]
    std::vector<int32_t> ids;         // [R*T, k]
    std::vector<float> weights;       // [R*T, k]
};

struct tables {
    std::vector<int32_t> slots, slot_pair, delivery_order, delivery_pos, block_target, block_group, job_order, chunk_expected,
        send_order, send_count, tasks;
    std::vector<int64_t> contributors;
    int64_t largest_segment = 1;  // row blocks

    int64_t num_blocks() const { return int64_t(block_target.size()); }
    schedule_view view(const shape &s, int rank) const {
        return {.tokens_per_rank = s.max_tokens, .top_k = s.top_k, .num_local_experts = s.experts_of(rank),
                .row_block = s.row_block, .job_chunk = s.job_chunk, .num_blocks = num_blocks(),
                .num_pull = int64_t(delivery_order.size()), .num_jobs = int64_t(job_order.size()),
                .num_tasks = int64_t(tasks.size() / 4), .slots = slots.data(), .slot_pair = slot_pair.data(),
                .delivery_order = delivery_order.data(), .delivery_pos = delivery_pos.data(),
                .block_target = block_target.data(), .block_group = block_group.data(), .tasks = tasks.data(),
                .job_order = job_order.data(), .chunk_expected = chunk_expected.data(), .send_order = send_order.data(),
                .send_count = send_count.data(), .contributors = contributors.data(), .num_chunks = s.chunks_of(s.job_chunk)};
    }
};

// Gives every pair of this rank its slot: by (segment, expert), then source rank, token, choice; groups padded to whole blocks.
inline void place_slots(const shape &s, const routing &r, int rank, tables &t) {
    t.slots.assign(size_t(s.world * s.max_tokens * s.top_k), -1);
    for (int64_t segment = 0; segment < s.segments; ++segment) {
        const int64_t blocks_before = t.num_blocks();
        for (int64_t expert = 0; expert < s.experts_of(rank); ++expert) {
            int64_t rows = 0;
            for (int64_t source = 0; source < s.world; ++source) {
                for (int64_t token = 0; token < r.counts[size_t(source)]; ++token) {
                    if (token * s.segments / r.counts[size_t(source)] != segment) continue;
                    for (int64_t j = 0; j < s.top_k; ++j) {
                        const int64_t pair = (source * s.max_tokens + token) * s.top_k + j;
                        if (r.ids[size_t(pair)] != s.first_expert(rank) + expert) continue;
                        if (rows++ % s.row_block == 0) {
                            t.block_target.push_back(0);
                            t.block_group.push_back(int32_t(segment * s.experts_of(rank) + expert));
                            t.slot_pair.resize(t.slot_pair.size() + size_t(s.row_block), -1);
                        }
                        const int64_t slot = (t.num_blocks() - 1) * s.row_block + t.block_target.back()++;
                        t.slots[size_t(pair)] = int32_t(slot);
                        t.slot_pair[size_t(slot)] = int32_t(pair);
                    }
                }
            }
        }
        t.largest_segment = std::max(t.largest_segment, t.num_blocks() - blocks_before);
    }
}

// Global rows with a slot in `slots`, sorted by their smallest or largest one.
inline std::vector<int32_t> rows_by_slot(const shape &s, const std::vector<int32_t> &slots, bool largest) {
    std::vector<std::pair<int32_t, int32_t>> keyed;
    for (int64_t row = 0; row < s.world * s.max_tokens; ++row) {
        int32_t key = -1;
        for (int64_t j = 0; j < s.top_k; ++j) {
            const int32_t slot = slots[size_t(row * s.top_k + j)];
            if (slot >= 0 && (key < 0 || (largest ? slot > key : slot < key))) key = slot;
        }
        if (key >= 0) keyed.emplace_back(key, int32_t(row));
    }
    std::sort(keyed.begin(), keyed.end());
    std::vector<int32_t> rows;
    for (const auto &entry : keyed) rows.push_back(entry.second);
    return rows;
}

inline void plan_sends(const shape &s, const routing &r, int rank, tables &t) {
    t.send_order.assign(size_t(s.world * s.max_tokens), -1);
    t.send_count.assign(size_t(s.world), 0);
    t.contributors.assign(size_t(s.max_tokens), 0);
    for (int to = 0; to < s.world; ++to) {
        tables there;
        place_slots(s, r, to, there);
        for (const int32_t row : rows_by_slot(s, there.slots, false)) {
            if (row / s.max_tokens != rank) continue;
            t.send_order[size_t(to * s.max_tokens + t.send_count[size_t(to)]++)] = int32_t(row % s.max_tokens);
            t.contributors[size_t(row % s.max_tokens)] |= int64_t(1) << to;
        }
    }
}

inline tables build_tables(const shape &s, const routing &r, int rank) {
    tables t;
    place_slots(s, r, rank, t);
    t.delivery_order = rows_by_slot(s, t.slots, false);
    t.job_order = rows_by_slot(s, t.slots, true);
    std::vector<int32_t> seen(size_t(s.world), 0);
    for (const int32_t row : t.delivery_order) t.delivery_pos.push_back(seen[size_t(row / s.max_tokens)]++);
    t.chunk_expected.assign(size_t(s.world * s.chunks_of(s.job_chunk)), 0);
    for (const int32_t row : t.job_order) {
        const int64_t source = row / s.max_tokens, chunk = row % s.max_tokens / s.job_chunk;
        ++t.chunk_expected[size_t(source * s.chunks_of(s.job_chunk) + chunk)];
    }
    plan_sends(s, r, rank, t);
    return t;
}

inline void add_tasks(tables &t, int32_t phase, int64_t block, int64_t columns) {
    for (int64_t column = 0; column < columns; ++column) {
        for (const int32_t field : {phase, t.block_group[size_t(block)], int32_t(block), int32_t(column)}) t.tasks.push_back(field);
    }
}

inline void order_for_one(tables &t, int64_t columns) {
    t.tasks.clear();
    for (int64_t block = 0; block < t.num_blocks(); ++block) add_tasks(t, 0, block, columns);
}

inline void order_for_mega(tables &t, int64_t columns1, int64_t columns2, int64_t warmup) {
    t.tasks.clear();
    for (int64_t step = 0; step < t.num_blocks() + warmup; ++step) {
        if (step < t.num_blocks()) add_tasks(t, 0, step, columns1);
        if (step >= warmup) add_tasks(t, 1, step - warmup, columns2);
    }
}

}  // namespace native
