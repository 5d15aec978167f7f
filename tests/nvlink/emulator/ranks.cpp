// Calls of the layer by all ranks of a group on the emulated machine: the kernels' roles as they are, and in place of the two
// GEMMs a loop over their tasks with the same gates and pushes. GEMM 1 gives column c of a row as its column c mod H, GEMM 2
// column c of that mod I, times 1 + expert mod 3 and, before_l2, the routing weight.
#include <cstdio>
#include <memory>

#include "scheduler.hpp"
#include "tk_kernels/nvlink/combine.cuh"
#include "tk_kernels/nvlink/hand_out.cuh"
#include "tk_kernels/nvlink/open_call.cuh"
#include "tk_kernels/nvlink/place_rows.cuh"
#include "tk_kernels/nvlink/row_sources.cuh"

namespace moe_tk::nvlink {

using fp8 = kittens::fp8e4m3;
uint8_t dynamic_shared[16];  // of the kernel open_call, which is not called itself

// What Python fills, by name: fields of the workspace, then of the call. Pointers are integers.
#define RANK_FIELDS(F)                                                                                                             \
    F(control) F(headers) F(posted) F(rows_posted) F(routing) F(rows) F(combined) F(planes) F(mailbox) F(record_claim) F(epoch)    \
    F(rank) F(max_tokens) F(top_k) F(hidden) F(row_bytes) F(job_chunk) F(job_chunks) F(counts) F(expert_offsets) F(slots)          \
    F(slot_pair) F(slot_weight) F(block_target) F(block_group) F(job_order) F(chunk_expected) F(expert_load)     \
    F(load_total) F(contributors) F(token_counts) F(tasks1) F(tasks2) F(l1_done) F(l2_done) F(job_done)     \
    F(next_item) F(blocks_done) F(copies_done) F(routing_sent) F(slot_rows) F(slot_scales) F(activated) F(expert_out)         \
    F(activated_scales) F(quantised) F(num_experts) F(first_expert) F(num_local) F(tensor_parallel) F(max_slots)    \
    F(max_blocks) F(intermediate) F(num_sms) F(hidden_states) F(hidden_scales) F(topk_ids) F(topk_weights) F(out) F(signature)     \
    F(num_tokens) F(refused) F(ids_are_64) F(weights_are_bf16) F(row_block) F(gather_cols) F(scatter_cols) F(segments) F(passes)   \
    F(weights_before_l2) F(serial) F(placed) F(cluster) F(takes_part) F(only_open) F(only_placed) F(most_naps)    \
    F(shared_bytes) F(one_sender_pairs) F(one_builder_pairs) F(hands_out) F(slots_out) F(offsets_out) F(stride)
struct rank_fields {
    int64_t bases[MAX_WORLD];
#define FIELD(name) int64_t name;
    RANK_FIELDS(FIELD)
};

template <class T> T *at(int64_t address) { return reinterpret_cast<T *>(address); }

call_view call_of(const rank_fields &r, int world) {
    call_view c{};
    for (int p = 0; p < world; ++p) c.base[p] = at<char>(r.bases[p]);
    c.at = {r.control, r.headers, r.posted, r.rows_posted, r.routing, r.rows, r.combined, r.planes};
    c.host = at<mailbox>(r.mailbox), c.record_claim = at<uint32_t>(r.record_claim), c.epoch_ptr = at<uint32_t>(r.epoch);
    c.timeout_ns = r.most_naps, c.world = world, c.rank = int(r.rank), c.max_tokens = int(r.max_tokens), c.top_k = int(r.top_k);
    c.hidden = int(r.hidden), c.job_chunk = int(r.job_chunk), c.job_chunks = int(r.job_chunks), c.row_bytes = int(r.row_bytes);
    c.keeps_own = int(r.quantised);
    return c;
}

table_view tables_of(const rank_fields &r) {
    return {at<int>(r.counts), at<int>(r.expert_offsets), at<int>(r.slots), at<int>(r.slot_pair), at<float>(r.slot_weight),
            at<int>(r.block_target), at<int>(r.block_group), at<int>(r.job_order),
            at<int>(r.chunk_expected), at<int>(r.expert_load), at<long long>(r.load_total), at<long long>(r.contributors),
            at<int>(r.token_counts),
            at<int4>(r.tasks1), at<int4>(r.tasks2)};
}

open_globals open_of(const rank_fields &r, const call_view &c) {
    return {.call = c, .tables = tables_of(r),
            .counters = {at<uint32_t>(r.l1_done), at<uint32_t>(r.l2_done), at<uint32_t>(r.job_done),
                         at<uint32_t>(r.next_item)},
            .signature = uint64_t(r.signature), .hidden_states = at<void>(r.hidden_states),
            .hidden_scales = at<float>(r.hidden_scales), .topk_ids = at<void>(r.topk_ids), .topk_weights = at<void>(r.topk_weights),
            .num_tokens = int(r.num_tokens),
            .refused = int(r.refused), .export_waits = 0, .quantise = int(r.quantised), .ids_are_64 = int(r.ids_are_64),
            .weights_are_bf16 = int(r.weights_are_bf16), .num_experts = int(r.num_experts), .first_expert = int(r.first_expert),
            .num_local = int(r.num_local), .tensor_parallel = int(r.tensor_parallel), .choices = divisor(int(r.top_k)), .chunks = divisor(int(r.job_chunk)),
            .row_block = int(r.row_block), .segments = int(r.segments),
            .max_blocks = int(r.max_blocks), .max_slots = int(r.max_slots),
            .col_blocks1 = int((2 * r.intermediate + r.gather_cols - 1) / r.gather_cols),
            .col_blocks2 = int((r.hidden + r.scatter_cols - 1) / r.scatter_cols), .per_step2 = int(GROUP_COLS / r.scatter_cols), .passes = int(r.passes),
            .epoch = at<uint32_t>(r.epoch), .blocks_done = at<uint32_t>(r.blocks_done), .copies_done = at<uint32_t>(r.copies_done),
            .routing_sent = at<uint32_t>(r.routing_sent),
            .room = room_for(int(r.segments * r.num_local), int(r.top_k), int(r.shared_bytes)), .one_sender_pairs = int(r.one_sender_pairs),
            .one_builder_pairs = int(r.one_builder_pairs)};
}

combine_params combine_of(const rank_fields &r, const open_globals &g) {
    const table_view &t = g.tables;
    return {.counts = t.counts, .slots = t.slots, .job_order = t.job_order, .chunk_expected = t.chunk_expected,
            .token_counts = t.token_counts, .contributors = t.contributors, .l2_done = g.counters.l2_done,
            .job_done = g.counters.job_done, .next_item = g.counters.next_item, .expert_out = at<bf16>(r.expert_out),
            .slot_weight = r.weights_before_l2 ? nullptr : t.slot_weight, .out = at<bf16>(r.out), .num_tokens = g.num_tokens,
            .row_block = g.row_block, .tiles = tiles_of(g.call.hidden, int(r.scatter_cols))};
}

// One rank's stream: launches one after the other, gemm_scatter beside gather_gemm.
class rank_stream {
  public:
    rank_stream(const rank_fields &r, int world) : r_(r), c_(call_of(r, world)), g_(open_of(r, c_)), combine_(combine_of(r, g_)) {}

    void launch_open() {
        const int blocks = 2 * OPEN_CLUSTER;
        const size_t bytes = r_.shared_bytes;
        building_.need = OPEN_CLUSTER * OPEN_THREADS, building_.blocks.resize(OPEN_CLUSTER);
        for (int block = 0; block < blocks; ++block) {
            emulator::meeting *all = meeting_of(OPEN_THREADS);
            auto *shared = static_cast<open_shared *>(shared_memory(bytes));
            if (block < OPEN_CLUSTER) building_.blocks[block].memory = reinterpret_cast<char *>(shared);
            emulator::cluster *cluster = block < OPEN_CLUSTER ? &building_ : nullptr;
            for (int first = 0; first < OPEN_THREADS; first += 32)
                start_warp({block, first, OPEN_THREADS, blocks, all, cluster}, before_, [this, shared] { open_thread(shared); });
        }
    }
    bool done() const { return stage_ == DONE; }
    void check_guards() const {
        for (const auto &lines : shared_)
            for (const uint8_t byte : lines->back().bytes)
                if (byte != 0x5a) emulator::fail("something was written behind a block's shared memory");
    }

  private:
    enum { OPENED, SLOTTED, PLACED, DONE } stage_ = OPENED;  // slotted: a fused call's rows are in their slots
    struct place { int block, thread, threads, blocks; emulator::meeting *all = nullptr; emulator::cluster *cluster = nullptr; };

    // A counter of threads, and what follows when the last one is done.
    void start(const place &at, emulator::warp *w, int &left, std::function<void()> body) {
        auto *f = new emulator::fiber;
        f->thread.x = at.thread, f->block.x = at.block, f->threads = dim3(at.threads), f->blocks = dim3(at.blocks);
        f->lane = at.thread % 32, f->of_warp = w, f->of_block = at.all, f->of_cluster = at.cluster;
        f->body = [this, body, &left] {
            body();
            if (--left == 0) next();
        };
        ++left;
        emulator::start(f);
    }
    void start_warp(place at, int &left, const std::function<void()> &body) {
        warps_.push_back(std::make_unique<emulator::warp>());
        for (int lane = 0; lane < 32; ++lane, ++at.thread) start(at, warps_.back().get(), left, body);
    }
    emulator::meeting *meeting_of(int need) {
        meetings_.push_back(std::make_unique<emulator::meeting>());
        meetings_.back()->need = need;
        return meetings_.back().get();
    }
    void *shared_memory(size_t bytes) {  // whatever was there before
        shared_.push_back(std::make_unique<vector_of_lines>((bytes + 127) / 128 + 1));  // and a guard
        std::memset(shared_.back()->data(), 0x5a, shared_.back()->size() * 128);
        return shared_.back()->data();
    }

    void next() {
        if (before_ + beside_ > 0) return;
        if (stage_ == OPENED && r_.placed && !r_.only_open) {
            stage_ = SLOTTED;
            launch_place_all();
        } else if ((stage_ == OPENED && !r_.only_open) || (stage_ == SLOTTED && !r_.only_placed)) {
            stage_ = PLACED;
            if (r_.serial) launch_place_all();
            else if (r_.hands_out) launch_gather();
            else launch_gather(), launch_scatter();
        } else if (stage_ == PLACED && r_.hands_out) {
            stage_ = DONE;
            launch_hand_out();
        } else if (stage_ == PLACED && r_.serial && !r_.only_placed) {
            stage_ = DONE;
            multiply_all();
            launch_combine();
        } else stage_ = DONE;
    }

    // As the kernel open_call.
    void open_thread(open_shared *shared) {
        const uint32_t epoch = *c_.epoch_ptr + 1;
        if (blockIdx.x < OPEN_CLUSTER) exchange_and_build(g_, epoch, *shared);
        else export_rows(g_, epoch);
        __syncthreads();
        if (threadIdx.x == 0 && fetch_inc_wrap_acq_rel_gpu(g_.blocks_done, gridDim.x - 1) == gridDim.x - 1) *g_.epoch = epoch;
    }

    void launch_gather() {
        const int sms = int(r_.num_sms);
        for (int block = 0; block < sms; ++block)
            start_warp({block, 0, 384, sms}, before_, [this] { r_.cluster == 2 ? multiply1<2>() : multiply1<1>(); });
    }
    void launch_scatter() {
        const int sms = int(r_.num_sms);
        const auto gather_is_over = [this] { while (before_ > 0) emulator::yield(); };
        for (int block = 0; block < sms; ++block) {
            emulator::meeting *tiles = meeting_of(33);
            start({block, 0, 384, sms}, nullptr, beside_, [this, tiles] {
                r_.cluster == 2 ? multiply2<2>() : multiply2<1>();
                emulator::meet(*tiles);
            });
            start_warp({block, 352, 384, sms}, beside_, [this, gather_is_over] {
                gather_is_over(), combine_and_reduce<3>(c_, combine_);
            });
            start_warp({block, 32, 384, sms}, beside_, [this, gather_is_over, tiles] {
                emulator::meet(*tiles);
                gather_is_over(), combine_and_reduce<8>(c_, combine_);
            });
        }
    }
    void launch_place_all() {
        r_.quantised ? place_rows<fp8>(nullptr) : place_rows<bf16>(at<bf16>(r_.hidden_states));
    }
    template <class T> void place_rows(const T *tokens) {
        const place_params<T> p{tokens, slots<T>(), g_.tables.counts, g_.tables.job_order, g_.tables.slots};
        start_four_warps_a_block([this, p] { row_placer<T>(c_, p).run(); });
    }
    template <class T> slot_rows<T> slots() const {  // where GEMM 1 finds rows that have been placed
        if (r_.placed) return rows_in_outputs<T>(at<void>(r_.expert_out), c_.hidden);
        return {at<T>(r_.slot_rows), c_.hidden, at<float>(r_.slot_scales), r_.max_slots};
    }
    void launch_combine() {
        start_four_warps_a_block([this] { combine_and_reduce<4, false>(c_, combine_); });
    }
    // Of dispatch_gemm, whose result has as many rows as the workspace has slots.
    void launch_hand_out() {
        const hand_out_globals g{c_, g_.tables,
                                 {.activated = at<void>(r_.activated), .scales = r_.quantised ? at<float>(r_.activated_scales) : nullptr,
                                  .expert_offsets = at<int>(r_.offsets_out), .slots = at<int>(r_.slots_out), .rows = int(r_.max_slots),
                                  .stride = int(r_.stride), .row_bytes = int(r_.intermediate) * (r_.quantised ? 1 : 2)},
                                 int(r_.num_local) + 1};
        start_four_warps_a_block([this, g] {
            hand_out_all(g, call_is_good(c_), blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
        });
    }
    void start_four_warps_a_block(const std::function<void()> &body) {
        for (int warp = 0; warp < 4 * r_.num_sms; ++warp)
            start_warp({warp / 4, warp % 4 * 32, 128, int(r_.num_sms)}, before_, body);
    }

    task_table list(bool second) const {
        return {second ? g_.tables.tasks2 : g_.tables.tasks1, g_.tables.counts + (second ? COUNT_TASKS2 : COUNT_TASKS1), 0,
                g_.tables.block_target};
    }
    // A loader warp and whoever computes behind it, in one.
    template <int CLUSTER> void multiply1() const {
        for_each_task<CLUSTER>(list(false), g_.row_block, blockIdx.x % CLUSTER, [&](const cluster_work &w) {
            if (w.ghost() || kittens::laneid() != 0) return;
            emulator::linger();  // who waits for fewer tiles than there are shall read what is not there
            tile1(w.task, !r_.placed);
            emulator::yield();
            count_push::publish({g_.counters.l1_done}, w.task);
        });
    }
    template <int CLUSTER> void multiply2() const {
        const activated_gate::params gate{{c_, g_.counters.l1_done}, uint32_t(g_.col_blocks1)};
        for_each_task<CLUSTER>(list(true), g_.row_block, blockIdx.x % CLUSTER, [&](const cluster_work &w) {
            if (w.ghost()) return;
            if (!activated_gate::ready(gate, w.task)) activated_gate::wait(gate, w.task);
            emulator::linger();
            tile2(w.task);
            emulator::yield();
            group_push::publish({g_.counters.l2_done, combine_.tiles}, w.task);
        });
    }
    void multiply_all() const {
        for (const bool second : {false, true})
            for (int i = 0; i < list(second).count(); ++i) {
                tile_task t = list(second).at(i);
                t.rows = g_.tables.block_target[t.row_block];
                second ? tile2(t) : tile1(t, false);
            }
    }
    // gathers: rows are read where they lie, not in their slots.
    void tile1(const tile_task &t, bool gathers) const {
        const int64_t h = r_.hidden, inter = r_.intermediate, cols = r_.gather_cols / 2, stride = r_.max_slots;
        for (int64_t slot = int64_t(t.row_block) * g_.row_block, end = slot + t.rows; slot < end; ++slot) {
            const int pair = g_.tables.slot_pair[slot];
            const uint8_t *row;
            if (gathers)
                row = r_.quantised ? row_of_pair<fp8>(c_, nullptr, pair) : row_of_pair(c_, at<const bf16>(r_.hidden_states), pair);
            else
                row = r_.quantised ? reinterpret_cast<const uint8_t *>(slots<fp8>().row(int(slot)))
                                   : reinterpret_cast<const uint8_t *>(slots<bf16>().row(int(slot)));
            const auto scale = [&](int block) {
                return gathers ? reinterpret_cast<const float *>(row + h)[block] : *slots<fp8>().scale(int(slot), block);
            };
            for (int64_t c = t.col_block * cols; c < min(inter, (t.col_block + 1) * cols); ++c) {
                const int64_t to = slot * inter + c;
                if (!r_.quantised) at<bf16>(r_.activated)[to] = reinterpret_cast<const bf16 *>(row)[c % h];
                else at<uint8_t>(r_.activated)[to] = row[c % h];
                if (r_.quantised && c % 128 == 0)
                    at<float>(r_.activated_scales)[c / 128 * stride + slot] = scale(int(c % h / 128));
            }
        }
    }
    void tile2(const tile_task &t) const {
        const int64_t h = r_.hidden, inter = r_.intermediate, cols = r_.scatter_cols, stride = r_.max_slots;
        for (int64_t slot = int64_t(t.row_block) * g_.row_block, end = slot + t.rows; slot < end; ++slot) {
            const float weight = r_.weights_before_l2 ? g_.tables.slot_weight[slot] : 1.0f;
            const float factor = weight * float(1 + (t.expert + r_.first_expert) % 3);
            for (int64_t c = t.col_block * cols; c < min(h, (t.col_block + 1) * cols); ++c) {
                const int64_t from = slot * inter + c % inter;
                float value = 0;
                if (!r_.quantised) value = __bfloat162float(at<bf16>(r_.activated)[from]);
                else value = float(at<fp8>(r_.activated)[from]) *
                             at<float>(r_.activated_scales)[c % inter / 128 * stride + slot];
                at<bf16>(r_.expert_out)[slot * h + c] = __float2bfloat16(value * factor);
            }
        }
    }

    struct alignas(128) line { uint8_t bytes[128]; };
    using vector_of_lines = std::vector<line>;
    const rank_fields &r_;
    const call_view c_;
    const open_globals g_;
    const combine_params combine_;
    int before_ = 0, beside_ = 0;  // threads: of the launch under way, and of gemm_scatter
    std::vector<std::unique_ptr<emulator::warp>> warps_;
    std::vector<std::unique_ptr<emulator::meeting>> meetings_;
    std::vector<std::unique_ptr<vector_of_lines>> shared_;
    emulator::cluster building_;
};

}  // namespace moe_tk::nvlink

using namespace moe_tk::nvlink;

extern "C" const char *emulator_fields() {
#define NAME(name) #name " "
    return RANK_FIELDS(NAME);
}

// A call of all ranks that take part. Returns how many threads cannot go on; -1 if a launch is missing.
extern "C" int emulator_call(int world, const rank_fields *ranks, int seed, int64_t most_idle) {
    std::vector<std::unique_ptr<rank_stream>> streams;
    for (int rank = 0; rank < world; ++rank)
        if (ranks[rank].takes_part) streams.push_back(std::make_unique<rank_stream>(ranks[rank], world));
    for (auto &stream : streams) stream->launch_open();
    const int stuck = emulator::run_all(seed, uint64_t(most_idle));
    for (auto &stream : streams)
        if (stuck == 0 && !stream->done()) return -1;
        else stream->check_guards();
    return stuck;
}
