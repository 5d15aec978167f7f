// Python bindings of the CPU backend. A Rank holds what lives as long as a workspace; pointers come in as integers, sizes
// and tables with their names. The GIL is released while blocks run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "../patterns/gather_gemm.hpp"
#include "../patterns/gemm_scatter.hpp"
#include "../patterns/mega.hpp"
#include "../platform/fault_points.hpp"
#include "../protocol/exchange.hpp"
#include "../protocol/wire.hpp"
#include "fields.hpp"

namespace py = pybind11;
using namespace moe_tk;
using bindings::fields;
using patterns::launch_globals;
using protocol::shm_wire;

namespace {

constexpr int DTYPE_FLOAT32 = 0, DTYPE_BFLOAT16 = 1;
constexpr double LONGEST_TIMEOUT_S = 1e9;  // a longer one would not fit into nanoseconds

protocol::symmetric_heap read_heap(const py::dict &values) {
    fields f(values, "heap");
    protocol::symmetric_heap heap;
    const auto bases = f.get<std::vector<uintptr_t>>("bases");
    heap.world = int(bases.size());
    if (heap.world < 1 || heap.world > protocol::MAX_RANKS) throw py::value_error("heap: 1 to 64 ranks");
    for (int r = 0; r < heap.world; ++r) heap.base[r] = reinterpret_cast<char *>(bases[size_t(r)]);
    heap.rank = f.get<int>("rank");
    heap.max_tokens = f.get<int64_t>("max_tokens");
    heap.send_chunks = f.get<int64_t>("send_chunks");
    heap.job_chunks = f.get<int64_t>("job_chunks");
    auto &at = heap.offset;
    at.control = f.get<int64_t>("control");
    at.header = f.get<int64_t>("header");
    at.posted = f.get<int64_t>("posted");
    at.done = f.get<int64_t>("done");
    at.topk_ids = f.get<int64_t>("topk_ids");
    at.topk_weights = f.get<int64_t>("topk_weights");
    at.sent = f.get<int64_t>("sent");
    at.arrivals = f.get<int64_t>("arrivals");
    at.combined = f.get<int64_t>("combined");
    at.planes = f.get<int64_t>("planes");
    f.done();
    return heap;
}

patterns::local_counters read_counters(const py::dict &values) {
    fields f(values, "counters");
    patterns::local_counters c;
    c.arrived = f.pointer<uint32_t>("arrived");
    c.arrived_want = f.pointer<uint32_t>("arrived_want");
    c.l1_done = f.pointer<uint32_t>("l1_done");
    c.l1_want = f.pointer<uint32_t>("l1_want");
    c.l2_done = f.pointer<uint32_t>("l2_done");
    c.l2_want = f.pointer<uint32_t>("l2_want");
    c.freed = f.pointer<uint32_t>("freed");
    c.freed_want = f.pointer<uint32_t>("freed_want");
    c.job_done = f.pointer<uint32_t>("job_done");
    c.job_want = f.pointer<uint32_t>("job_want");
    c.progress = f.pointer<uint32_t>("progress");
    c.last_forward_ns = f.pointer<uint64_t>("last_forward_ns");
    f.done();
    return c;
}

patterns::schedule_view read_schedule(const py::dict &values) {
    fields f(values, "schedule");
    patterns::schedule_view s;
    s.tokens_per_rank = f.get<int64_t>("tokens_per_rank");
    s.top_k = f.get<int64_t>("top_k");
    s.num_local_experts = f.get<int64_t>("num_local_experts");
    s.row_block = f.get<int64_t>("row_block");
    s.job_chunk = f.get<int64_t>("job_chunk");
    s.num_blocks = f.get<int64_t>("num_blocks");
    s.num_pull = f.get<int64_t>("num_pull");
    s.num_jobs = f.get<int64_t>("num_jobs");
    s.num_tasks = f.get<int64_t>("num_tasks");
    s.num_chunks = f.get<int64_t>("num_chunks");
    s.slots = f.pointer<int32_t>("slots");
    s.slot_pair = f.pointer<int32_t>("slot_pair");
    s.delivery_order = f.pointer<int32_t>("delivery_order");
    s.delivery_pos = f.pointer<int32_t>("delivery_pos");
    s.block_target = f.pointer<int32_t>("block_target");
    s.block_group = f.pointer<int32_t>("block_group");
    s.tasks = f.pointer<int32_t>("tasks");
    s.job_order = f.pointer<int32_t>("job_order");
    s.chunk_expected = f.pointer<int32_t>("chunk_expected");
    s.send_order = f.pointer<int32_t>("send_order");
    s.send_count = f.pointer<int32_t>("send_count");
    s.contributors = f.pointer<int64_t>("contributors");
    f.done();
    return s;
}

void read_launch(const py::dict &values, launch_globals &g) {
    fields f(values, "launch");
    g.op = protocol::op_id(f.get<uint32_t>("op"));
    g.hidden = f.get<int64_t>("hidden");
    g.intermediate = f.get<int64_t>("intermediate");
    g.out_width = f.get<int64_t>("out_width");
    g.column_block = f.get<int64_t>("column_block");
    g.send_chunk = f.get<int64_t>("send_chunk");
    g.ring_blocks = f.get<int64_t>("ring_blocks");
    g.num_tokens = f.get<int64_t>("num_tokens");
    g.tokens = f.pointer<void>("tokens");
    g.gathered = f.pointer<void>("gathered");
    g.w13 = f.pointer<void>("w13");
    g.activated = f.pointer<void>("activated");
    g.w2 = f.pointer<void>("w2");
    g.expert_out = f.pointer<void>("expert_out");
    g.out = f.pointer<void>("out");
    g.pair_weights = f.pointer<float>("pair_weights");
    g.weights_before_l2 = f.get<bool>("weights_before_l2");
    g.activation = {f.get<float>("alpha"), f.get<float>("beta"), f.get<float>("gate_limit"), f.get<float>("up_limit")};
    g.num_send = f.get<int>("num_send");
    g.num_place = f.get<int>("num_place");
    g.num_compute = f.get<int>("num_compute");
    g.num_combine = f.get<int>("num_combine");
    g.closes_call = f.get<bool>("closes_call");
    g.record_trace = f.get<bool>("record_trace");
    g.pull = f.get<bool>("pull");
    f.done();
}

py::dict to_python(const patterns::launch_result &result) {
    py::dict out;
    out["ok"] = result.ok;
    out["fault"] = result.fault;
    out["bytes_dispatched"] = result.bytes_dispatched;
    out["bytes_combined"] = result.bytes_combined;
    out["wait_ns"] = std::vector<uint64_t>(result.wait_ns, result.wait_ns + 8);
    out["busy_ns"] = std::vector<uint64_t>(result.busy_ns, result.busy_ns + 8);
    py::list trace;
    for (const auto &e : result.trace) trace.append(py::make_tuple(e.block, e.phase, e.item, e.begin_ns, e.ready_ns, e.end_ns));
    out["trace"] = trace;
    return out;
}

template <class T>
patterns::launch_result run_pattern(const std::string &pattern, const launch_globals &g) {
    const auto pick = [&](auto dispatch) -> patterns::launch_result {
        using Dispatch = decltype(dispatch);
        if (pattern == "gather_gemm") return patterns::gather_gemm<T, shm_wire, Dispatch>(g, true);
        if (pattern == "gather_gemm_plain") return patterns::gather_gemm<T, shm_wire, Dispatch>(g, false);
        return patterns::mega<T, shm_wire, Dispatch>(g);
    };
    if (pattern == "gemm_scatter") return patterns::gemm_scatter<T, shm_wire>(g, false);
    if (pattern == "gemm_scatter_gated") return patterns::gemm_scatter<T, shm_wire>(g, true);
    return g.pull ? pick(hooks::pull_rows{}) : pick(hooks::push_rows{});
}

// One rank of a workspace: its heap, its counters and its epoch, which lives in workspace memory.
class rank_state {
  public:
    rank_state(const py::dict &heap, const py::dict &counters, uintptr_t epoch)
        : heap_(read_heap(heap)), counters_(read_counters(counters)), epoch_(reinterpret_cast<uint32_t *>(epoch)) {}

    uint32_t epoch() const { return *epoch_; }

    // Opens the next call. Returns the headers of all ranks, or None if a wait ran out or somebody aborted.
    py::object exchange(uint32_t op, uint32_t layer, uint64_t signature, int64_t num_tokens, const std::string &refused,
                        uintptr_t ids, uintptr_t weights, int64_t top_k, double timeout_s) {
        const auto context = wait_context(timeout_s);
        protocol::call_header header{.num_tokens = num_tokens, .signature = signature, .op = op, .layer = layer,
                                     .refused = refused.empty() ? 0u : 1u, .padding = 0, .text = {}};
        std::strncpy(header.text, refused.c_str(), sizeof(header.text) - 1);
        const protocol::routing_view routing{reinterpret_cast<const int32_t *>(ids), reinterpret_cast<const float *>(weights),
                                             num_tokens, top_k};
        const protocol::wait_site site{protocol::op_id(op), protocol::phase_id::exchange, protocol::role_id::host, heap_.rank};
        bool ok;
        {
            py::gil_scoped_release release;
            ok = protocol::exchange_headers<shm_wire>(heap_, header, routing, context, site);
        }
        if (!ok) return py::none();
        py::list headers;
        for (int from = 0; from < heap_.world; ++from) {
            const auto &h = *heap_.header(heap_.rank, from);
            headers.append(py::make_tuple(h.num_tokens, h.signature, h.op, h.layer, h.refused != 0, std::string(h.text)));
        }
        return headers;
    }

    // Closes a call in which nothing was launched (refused or void): the peers may go on.
    void finish() { protocol::arrive<shm_wire>(heap_, *epoch_); }

    py::dict launch(const std::string &pattern, int dtype, const py::dict &values, const py::dict &schedule, double timeout_s) {
        static const std::set<std::string> known{"gather_gemm", "gather_gemm_plain", "gemm_scatter", "gemm_scatter_gated", "mega"};
        if (!known.count(pattern)) throw py::value_error("unknown pattern '" + pattern + "'");
        launch_globals g;
        read_launch(values, g);
        g.schedule = read_schedule(schedule);
        g.heap = heap_;
        g.counters = counters_;
        g.wait = wait_context(timeout_s);
        patterns::launch_result result;
        {
            py::gil_scoped_release release;
            result = dtype == DTYPE_BFLOAT16 ? run_pattern<engine::bf16>(pattern, g) : run_pattern<float>(pattern, g);
        }
        return to_python(result);
    }

    // Ends all waits of all ranks: this process cannot go on (an exception between the steps of a call, a block that threw).
    // The record replaces what blocks of this rank filed when they were told.
    void abort() {
        const auto context = wait_context(1.0);
        protocol::wait_record record;
        record.site.rank = heap_.rank;
        record.kind = uint32_t(protocol::abort_kind::host);
        record.epoch = *epoch_;
        record_claim_ = 1;
        protocol::write_record(context, record);
        protocol::raise_abort(context, protocol::abort_kind::host);
    }

    // The liveness watch found the process of `lost` gone.
    void note_lost(int lost) {
        auto *own = heap_.control(heap_.rank);
        const uint64_t before = platform::load_relaxed<platform::scope::system>(&own->lost_ranks);
        platform::store_release<platform::scope::system>(&own->lost_ranks, before | uint64_t(1) << lost);
    }

    uint32_t abort_flag() const {
        return platform::load_acquire<platform::scope::system>(&heap_.control(heap_.rank)->abort_flag);
    }

    // The wait records that have been filed, one per rank at most.
    py::list records() const {
        py::list out;
        auto *own = heap_.control(heap_.rank);
        protocol::wait_record r;
        for (int from = 0; from < heap_.world; ++from) {
            if (!protocol::read_record(own, from, r)) continue;
            py::dict d;
            d["rank"] = r.site.rank;
            d["op"] = uint32_t(r.site.op);
            d["phase"] = uint32_t(r.site.phase);
            d["role"] = uint32_t(r.site.role);
            d["block"] = r.site.block;
            d["slot"] = r.site.slot;
            d["producer"] = r.site.producer;
            d["expected"] = r.expected;
            d["seen"] = r.seen;
            d["kind"] = r.kind;
            d["epoch"] = r.epoch;
            d["seconds"] = double(r.waited_ns) * 1e-9;
            d["missing"] = r.missing;
            out.append(d);
        }
        return out;
    }

  private:
    protocol::wait_context wait_context(double timeout_s) {
        protocol::wait_context context;
        context.own = heap_.control(heap_.rank);
        for (int r = 0; r < heap_.world; ++r) context.peers[r] = heap_.control(r);
        context.world = heap_.world;
        context.rank = heap_.rank;
        context.epoch_word = epoch_;
        context.timeout_ns = uint64_t(std::min(timeout_s, LONGEST_TIMEOUT_S) * 1e9);
        context.record_claim = &record_claim_;
        context.progress = counters_.progress;
        context.last_forward_ns = counters_.last_forward_ns;
        return context;
    }

    protocol::symmetric_heap heap_;
    patterns::local_counters counters_;
    uint32_t *epoch_;
    uint32_t record_claim_ = 0;  // one record per workspace life: after it the workspace is poisoned
};

// The host engine alone: out[rows, columns] = a[rows, depth] * weight[columns, depth]^T for each group of rows.
template <class T, class Out>
void grouped_gemm(uintptr_t a, uintptr_t weights, uintptr_t out, const std::vector<int64_t> &offsets, int64_t depth, int64_t columns,
                  int64_t row_block) {
    engine::tile_scratch scratch;
    const int64_t stride = (columns + engine::PANEL - 1) / engine::PANEL * engine::PANEL;
    for (size_t group = 0; group + 1 < offsets.size(); ++group) {
        const T *weight = reinterpret_cast<const T *>(weights) + int64_t(group) * columns * depth;
        for (int64_t row = offsets[group]; row < offsets[group + 1]; row += row_block) {
            const int rows = int(std::min(row_block, offsets[group + 1] - row));
            scratch.acc.resize(size_t(rows * stride));
            engine::load_rows(reinterpret_cast<const T *>(a) + row * depth, depth, rows, depth, scratch);
            engine::multiply(weight, depth, int(columns), rows, depth, scratch, scratch.acc.data(), stride);
            for (int r = 0; r < rows; ++r) {
                Out *to = reinterpret_cast<Out *>(out) + (row + r) * columns;
                for (int64_t c = 0; c < columns; ++c) to[c] = engine::from_float<Out>(scratch.acc[size_t(r * stride + c)]);
            }
        }
    }
}

}  // namespace

PYBIND11_MODULE(moe_tk_host, m) {
    m.attr("CONTROL_BYTES") = sizeof(protocol::control_block);
    m.attr("HEADER_BYTES") = sizeof(protocol::call_header);
    m.attr("MAX_RANKS") = protocol::MAX_RANKS;
    m.attr("FLOAT32") = DTYPE_FLOAT32;
    m.attr("BFLOAT16") = DTYPE_BFLOAT16;
    py::class_<rank_state>(m, "Rank")
        .def(py::init<const py::dict &, const py::dict &, uintptr_t>(), py::arg("heap"), py::arg("counters"), py::arg("epoch"))
        .def_property_readonly("epoch", &rank_state::epoch)
        .def("exchange", &rank_state::exchange, py::kw_only(), py::arg("op"), py::arg("layer"), py::arg("signature"),
             py::arg("num_tokens"), py::arg("refused"), py::arg("topk_ids"), py::arg("topk_weights"), py::arg("top_k"),
             py::arg("timeout_s"))
        .def("finish", &rank_state::finish)
        .def("launch", &rank_state::launch, py::kw_only(), py::arg("pattern"), py::arg("dtype"), py::arg("launch"),
             py::arg("schedule"), py::arg("timeout_s"))
        .def("abort", &rank_state::abort)
        .def("note_lost", &rank_state::note_lost, py::arg("lost"))
        .def_property_readonly("abort_flag", &rank_state::abort_flag)
        .def("records", &rank_state::records);
#ifdef MOE_TK_FAULT_POINTS
    m.def("arm_fault", [](uint32_t action, uint32_t phase, int64_t point, double delay_s, uintptr_t stamp) {
        platform::fault_points::arm(action, phase, point, uint64_t(delay_s * 1e9), reinterpret_cast<uint64_t *>(stamp));
    }, py::kw_only(), py::arg("action"), py::arg("phase"), py::arg("point"), py::arg("delay_s"), py::arg("stamp"));
#endif
    m.def("grouped_gemm", [](int dtype, uintptr_t a, uintptr_t weights, uintptr_t out, const std::vector<int64_t> &offsets,
                             int64_t depth, int64_t columns, int64_t row_block, bool float_out) {
        py::gil_scoped_release release;
        if (dtype != DTYPE_BFLOAT16) return grouped_gemm<float, float>(a, weights, out, offsets, depth, columns, row_block);
        if (float_out) return grouped_gemm<engine::bf16, float>(a, weights, out, offsets, depth, columns, row_block);
        grouped_gemm<engine::bf16, engine::bf16>(a, weights, out, offsets, depth, columns, row_block);
    }, py::kw_only(), py::arg("dtype"), py::arg("a"), py::arg("weights"), py::arg("out"), py::arg("offsets"), py::arg("depth"),
       py::arg("columns"), py::arg("row_block"), py::arg("float_out") = false);
}
