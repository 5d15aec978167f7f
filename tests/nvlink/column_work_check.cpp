// Goes through the lists of work of many calls as the warps do, on the code that the kernels run: every sum exactly once, every
// watermark exactly once and not too early, and ranks that never wait for each other. Says what is wrong and returns 1.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "tk_kernels/nvlink/column_work.hpp"

using namespace moe_tk::nvlink;

namespace {

constexpr int JOB_CHUNK = 32;
std::mt19937 draw(1);
int below(int n) { return int(draw() % unsigned(n)); }

void want(bool right, const char *what, int a = 0, int b = 0, int c = 0) {
    if (right) return;
    std::printf("%s (%d, %d, %d)\n", what, a, b, c);
    std::exit(1);
}

// Tiles of GEMM 2 are counted by the group that `group_of` says, waits are for the number that `size` says; and when so many have
// come all columns are there that the group's items read.
void check_groups(int hidden, int block_cols) {
    const column_tiles tiles = tiles_of(hidden, block_cols);
    const column_groups columns = tiles.columns;
    want(columns.groups == groups_of(hidden).groups && columns.steps == groups_of(hidden).steps, "groups of narrow tiles", hidden);
    std::vector<uint32_t> counted(columns.groups);
    std::vector<int> group_of_column(hidden, -1);
    for (int tile = 0; tile * block_cols < hidden; ++tile) {
        const int group = tiles.group_of(tile);
        want(0 <= group && group < columns.groups, "a tile of no group", hidden, tile);
        ++counted[group];
        for (int col = tile * block_cols; col < std::min(hidden, (tile + 1) * block_cols); ++col) group_of_column[col] = group;
    }
    for (int group = 0; group < columns.groups; ++group) {
        want(counted[group] == tiles.size(group) && counted[group] > 0, "tiles of a group", hidden, group, int(counted[group]));
        const column_slice all = slice_of(columns, hidden, group, 0, 1);
        for (int col = all.first; col < all.last; ++col) want(group_of_column[col] == group, "a column of another group", hidden, col);
    }
    want(tiles.first(columns.groups) == tiles.col_blocks && columns.first(columns.groups) * GROUP_COLS >= hidden, "columns of no group", hidden);
}

int width_of(int hidden, int groups) { return (hidden + groups - 1) / groups; }

// Every (entry, 8 columns) is in one item.
void check_cover(int hidden, int entries, int most_in_batch) {
    const column_groups columns = groups_of(hidden);
    const work_cut cut = cut_work(entries, columns.groups, width_of(hidden, columns.groups), most_in_batch);
    want(cut.batch <= most_in_batch, "more entries than lanes", hidden, entries, cut.batch);
    std::vector<uint8_t> seen(size_t(entries) * hidden / 8);
    for (int group = 0; group < columns.groups; ++group)
        for (int item = 0; item < cut.items(); ++item) {
            const int first = item / cut.slices * cut.batch, count = std::min(cut.batch, entries - first);
            want(count > 0, "an item without entries", hidden, entries, item);
            const column_slice slice = slice_of(columns, hidden, group, item % cut.slices, cut.slices);
            for (int entry = first; entry < first + count; ++entry)
                for (int col = slice.first; col < slice.last; col += 8) ++seen[(size_t(entry) * hidden + col) / 8];
        }
    for (size_t i = 0; i < seen.size(); ++i) want(seen[i] == 1, "columns of an entry, times", hidden, int(i * 8 / hidden), seen[i]);
}

struct job { int source, token; };
struct rank_work {
    std::vector<job> jobs;
    int tokens;
    work_cut job_cut, token_cut;
    work_list list;
    std::map<std::pair<int, int>, int> chunk_expected;  // by source and chunk
};

// Any warp finishes a job's slice at any time: the last one of a chunk, and no other, says that the group is there.
void check_elections(const rank_work &work, int hidden) {
    const column_groups columns = groups_of(hidden);
    std::vector<int> items;
    for (int i = 0; i < work.list.size(); ++i)
        if (work.list.at(i).is_job) items.push_back(i);
    std::shuffle(items.begin(), items.end(), draw);
    std::map<std::tuple<int, int, int>, int> job_done, columns_done, published;
    for (int item : items) {
        const work_list::place at = work.list.at(item);
        const int first = at.index / work.job_cut.slices * work.job_cut.batch, slices = work.job_cut.slices;
        const column_slice slice = slice_of(columns, hidden, at.group, at.index % slices, slices);
        const int last = std::min(int(work.jobs.size()), first + work.job_cut.batch);
        for (int j = first; j < last; ++j) {
            const std::tuple key{work.jobs[j].source, work.jobs[j].token / JOB_CHUNK, at.group};
            columns_done[key] += std::max(0, slice.last - slice.first);
            const int expected = work.chunk_expected.at({std::get<0>(key), std::get<1>(key)});
            if (++job_done[key] != expected * slices) continue;
            const int width = std::min(hidden, columns.first(at.group + 1) * GROUP_COLS) - columns.first(at.group) * GROUP_COLS;
            want(columns_done[key] == expected * width, "a watermark came too early", std::get<0>(key), std::get<1>(key), at.group);
            ++published[key];
        }
    }
    want(published.size() == work.chunk_expected.size() * columns.groups, "watermarks that never came", hidden, int(published.size()));
    for (const auto &[key, times] : published) want(times == 1, "a watermark, times", hidden, std::get<1>(key), times);
}

rank_work make_rank(int hidden, int top_k, const std::vector<int> &tokens, int rank, int percent) {
    const int world = int(tokens.size()), groups = groups_of(hidden).groups, width = width_of(hidden, groups);
    rank_work work{.jobs = {}, .tokens = tokens[rank], .job_cut = {}, .token_cut = {}, .list = {}, .chunk_expected = {}};
    for (int source = 0; source < world; ++source)
        for (int token = 0; token < tokens[source]; ++token)
            if (below(100) < percent) work.jobs.push_back({source, token}), ++work.chunk_expected[{source, token / JOB_CHUNK}];
    std::shuffle(work.jobs.begin(), work.jobs.end(), draw);
    work.job_cut = cut_work(int(work.jobs.size()), groups, width, std::min(4, 32 / top_k));
    work.token_cut = cut_work(work.tokens, groups, width, std::min(8, 32 / world));
    work.list = {groups, work.job_cut.items(), work.token_cut.items()};
    return work;
}

// `warps` warps of each rank take items in order and wait in them as combine_and_reduce does. Tiles come at any time, so a job may
// always end; a warp that holds a token ends when all jobs of its chunks and group have ended on all ranks that owe them.
void check_progress(const std::vector<rank_work> &ranks, int warps) {
    struct warp { int rank, item; };
    std::vector<warp> all;
    std::vector<int> dispenser(ranks.size());
    std::vector<std::map<std::tuple<int, int, int>, int>> done(ranks.size());  // of a rank, by (source, chunk, group): slices of jobs
    for (int r = 0; r < int(ranks.size()); ++r)
        for (int w = 0; w < warps; ++w) all.push_back({r, dispenser[r]++});
    const auto may_end = [&](const warp &w) {
        const rank_work &work = ranks[w.rank];
        const work_list::place at = work.list.at(w.item);
        if (at.is_job) return true;
        const int first = at.index / work.token_cut.slices * work.token_cut.batch;
        for (int t = first; t < std::min(work.tokens, first + work.token_cut.batch); ++t)
            for (int other = 0; other < int(ranks.size()); ++other) {
                const auto found = ranks[other].chunk_expected.find({w.rank, t / JOB_CHUNK});
                if (found == ranks[other].chunk_expected.end()) continue;
                const auto &sums = done[other];
                const auto sum = sums.find({w.rank, t / JOB_CHUNK, at.group});
                if (sum == sums.end() || sum->second < found->second * ranks[other].job_cut.slices) return false;
            }
        return true;
    };
    while (!all.empty()) {
        bool moved = false;
        std::shuffle(all.begin(), all.end(), draw);
        for (size_t i = 0; i < all.size();) {
            warp &w = all[i];
            const rank_work &work = ranks[w.rank];
            if (w.item >= work.list.size()) {
                w = all.back(), all.pop_back();
                moved = true;
                continue;
            }
            const work_list::place at = work.list.at(w.item);
            if (may_end(w) && (!at.is_job || below(4) == 0)) {
                if (at.is_job) {
                    const int first = at.index / work.job_cut.slices * work.job_cut.batch;
                    for (int j = first; j < std::min(int(work.jobs.size()), first + work.job_cut.batch); ++j)
                        ++done[w.rank][{work.jobs[j].source, work.jobs[j].token / JOB_CHUNK, at.group}];
                }
                w.item = dispenser[w.rank]++;
                moved = true;
            } else if (at.is_job) {
                moved = true;  // its tiles come some time
            }
            ++i;
        }
        want(moved, "all warps of all ranks wait for each other", int(ranks.size()), warps);
    }
}

}  // namespace

int main() {
    std::vector<int> widths{8, 128, 248, 256, 264, 504, 512, 520, 768, 1016, 1024, 1032, 1280, 2048, 2056, 2880, 4096, 5120, 7168, 7176, 8192};
    for (int i = 0; i < 40; ++i) widths.push_back(8 * (1 + below(1500)));
    for (int hidden : widths) {
        for (int block_cols : {128, 256}) check_groups(hidden, block_cols);
        for (int entries : {0, 1, 2, 3, 33, 511, 512, 513, 1023, 1025, 2048, 2049, 4097})
            for (int most : {1, 2, 4, 8}) check_cover(hidden, entries, most);
    }
    for (int entries : {16384, 65536, 262144}) check_cover(264, entries, 4);
    struct sizes { int hidden, top_k; std::vector<int> tokens; };
    const std::vector<sizes> calls{{264, 8, {40, 0}},     {8, 1, {1, 1}},           {2048, 8, {333, 64}},  {7168, 8, {64, 64}},  {1032, 32, {65, 700}},
                                   {2880, 4, {0, 0}},     {4096, 8, {5000, 33}},    {520, 2, {129}},       {2048, 6, {96, 1, 0, 31}},
                                   {1024, 32, {1500, 2}}, {4096, 8, {3000, 2500}}, {256, 8, {9000, 1}}};
    for (const sizes &call : calls)
        for (int percent : {0, 3, 60, 100}) {
            std::vector<rank_work> ranks;
            for (int rank = 0; rank < int(call.tokens.size()); ++rank) ranks.push_back(make_rank(call.hidden, call.top_k, call.tokens, rank, percent));
            for (const rank_work &work : ranks) check_elections(work, call.hidden);
            if (call.tokens[0] > 1000) continue;
            for (int warps : {1, 2, 7}) check_progress(ranks, warps);
        }
    std::puts("ok");
}
