// Python bindings of moe_tk.ops over NVLink: dense and routed operations. Device pointers and streams are integers.
#include "nvlink_ops.hpp"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "../nvlink/dense.cuh"
#include "../nvlink/routed_ops.cuh"
#include "fields.hpp"

namespace py = pybind11;

namespace moe_tk::bindings {

namespace {

cudaStream_t stream_of(uint64_t stream) { return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)); }
uint64_t nanoseconds(double seconds) { return uint64_t(seconds * 1e9); }

nvlink::dense_view read_dense(const py::dict &values) {
    fields f(values, "dense workspace");
    nvlink::dense_view v{};
    nvlink::call_view &c = v.call;
    const auto bases = f.get<std::vector<uintptr_t>>("bases");
    c.world = int(bases.size());
    if (c.world < 1 || c.world > nvlink::MAX_WORLD) throw py::value_error("bases: wanted 1.." + std::to_string(nvlink::MAX_WORLD) + " ranks");
    for (int r = 0; r < c.world; ++r) c.base[r] = reinterpret_cast<char *>(bases[r]);
    c.at.control = f.get<int64_t>("control"), c.at.headers = f.get<int64_t>("headers"), c.at.posted = f.get<int64_t>("posted");
    c.at.combined = f.get<int64_t>("combined"), c.at.planes = f.get<int64_t>("planes");
    c.host = f.pointer<nvlink::mailbox>("mailbox"), c.record_claim = f.pointer<uint32_t>("record_claim");
    c.epoch_ptr = v.epoch = f.pointer<uint32_t>("epoch");
    c.rank = f.get<int>("rank"), c.max_tokens = f.get<int>("max_tokens"), c.hidden = f.get<int>("hidden");
    c.top_k = 1, c.job_chunk = 1, c.job_chunks = f.get<int>("max_blocks");
    v.tasks = f.pointer<int4>("tasks"), v.block_rows = f.pointer<int>("block_rows"), v.done = f.pointer<uint32_t>("done");
    v.words = f.pointer<uint32_t>("words"), v.max_columns = f.get<int>("max_columns"), v.num_sms = f.get<int>("num_sms");
    f.done();
    return v;
}

// One workspace of ag_gemm (the planes hold rows of k elements) or gemm_rs (of n elements).
class dense_workspace {
  public:
    explicit dense_workspace(const py::dict &values) : v_(read_dense(values)) { nvlink::prepare_dense(); }

    // Launches stages (bits 1 open, 2 run, 4 seal) of a call; returns at once.
    void run(const py::dict &values, bool gathers, int stages, double timeout_s, uint64_t stream) {
        fields f(values, "dense call");
        const nvlink::dense_call call{.x = f.pointer<void>("x"), .weight = f.pointer<void>("weight"), .out = f.pointer<void>("out"),
                                      .signature = f.get<uint64_t>("signature"), .num_tokens = f.get<int>("num_tokens"),
                                      .refused = f.get<bool>("refused"), .variant = f.get<int>("variant"), .k = f.get<int>("k"),
                                      .n = f.get<int>("n")};
        f.done();
        check(call, gathers);
        nvlink::dense_view v = v_;
        v.call.timeout_ns = nanoseconds(timeout_s);
        const cudaStream_t s = stream_of(stream);
        const auto &variant = nvlink::dense_variants[call.variant];
        if (stages & nvlink::DENSE_OPEN) nvlink::launch_open_dense(v, call, gathers ? 0 : 1, s);
        if (stages & nvlink::DENSE_RUN) (gathers ? variant.gather : variant.scatter)(v, call, s);
        if (stages & nvlink::DENSE_SEAL) nvlink::launch_seal_dense(v, call, s);
    }

  private:
    void check(const nvlink::dense_call &call, bool gathers) const {
        if (call.variant < 0 || call.variant >= nvlink::num_dense_variants)
            throw py::value_error("variant " + std::to_string(call.variant) + " does not exist");
        const int width = gathers ? call.k : call.n;
        if (call.refused) return;
        if (call.num_tokens > v_.call.max_tokens || width != v_.call.hidden || call.n > v_.max_columns)
            throw py::value_error("call of " + std::to_string(call.num_tokens) + " rows, k " + std::to_string(call.k) + ", n " +
                                  std::to_string(call.n) + " does not fit the workspace");
    }
    nvlink::dense_view v_;
};

// The layer's workspace with the launches of the routed operations.
class routed_workspace {
  public:
    explicit routed_workspace(const py::dict &values) : w_(workspace_of(values)) {
        nvlink::prepare_open_call();
        nvlink::prepare_routed_ops();
        nvlink::prepare_scaled_routed_ops();
    }

    // Launches stages (nvlink::routed_stage) of a call; returns at once.
    void run(const py::dict &values, int stages, double timeout_s, uint64_t stream) {
        fields f(values, "routed call");
        const nvlink::layer_call call{
            .hidden_states = f.pointer<void>("hidden_states"), .topk_ids = f.pointer<void>("topk_ids"),
            .topk_weights = f.pointer<void>("topk_weights"), .hidden_scales = f.pointer<float>("hidden_scales"),
            .out = f.pointer<void>("out"), .w13 = f.pointer<void>("w13"), .w2 = f.pointer<void>("w2"),
            .w13_scales = f.pointer<void>("w13_scales"), .w2_scales = f.pointer<void>("w2_scales"),
            .signature = f.get<uint64_t>("signature"), .num_tokens = f.get<int>("num_tokens"),
            .refused = f.get<bool>("refused"), .ids_are_64 = f.get<bool>("ids_are_64"),
            .weights_are_bf16 = f.get<bool>("weights_are_bf16"), .variant = f.get<int>("variant"), .segments = 1, .passes = 1,
            .weights_before_l2 = f.get<bool>("weights_before_l2"), .alpha = f.get<float>("alpha"), .beta = f.get<float>("beta"),
            .limit = f.get<float>("limit"), .export_blocks = 0, .export_waits = 1,
            .activated_given = !(stages & (nvlink::ROUTED_GATHER | nvlink::ROUTED_PRODUCT))};
        nvlink::workspace_view w = w_;
        w.activated = f.pointer<void>("activated"), w.activated_scales = f.pointer<float>("activated_scales");
        w.scales_stride = f.get<int>("scales_stride");
        const nvlink::dispatch_result result{.activated = w.activated, .scales = w.activated_scales,
                                             .expert_offsets = f.pointer<int>("expert_offsets"), .slots = f.pointer<int>("slots_out"),
                                             .rows = f.get<int>("rows"), .stride = f.get<int>("stride"),
                                             .row_bytes = f.get<int>("row_bytes")};
        f.done();
        check(call, result, w.scales_stride, stages);
        w.call.timeout_ns = nanoseconds(timeout_s);
        const cudaStream_t s = stream_of(stream);
        if (stages & nvlink::ROUTED_OPEN) nvlink::launch_open_call(w, call, s);
        if (w.quantised && result.rows > 0) w.max_slots = result.rows;  // from here on the caller's tensor, which may end within a row block
        const auto gather = w.quantised ? nvlink::launch_scaled_gather : nvlink::launch_checkpoint_gather;
        const auto scatter = w.quantised ? nvlink::launch_scaled_scatter : nvlink::launch_checkpoint_scatter;
        if (stages & nvlink::ROUTED_GATHER) gather(w, call, stages & nvlink::ROUTED_OPEN, s);
        if (stages & nvlink::ROUTED_PRODUCT) nvlink::launch_scaled_product(w, call, stages & nvlink::ROUTED_OPEN, s);
        if (stages & nvlink::ROUTED_SCATTER) scatter(w, call, stages & nvlink::ROUTED_GATHER, s);
        if (stages & nvlink::ROUTED_HAND_OUT) nvlink::launch_hand_out(w, result, s);
    }

  private:
    void check(const nvlink::layer_call &call, const nvlink::dispatch_result &result, int scales_stride, int stages) const {
        const int variants = w_.quantised ? nvlink::num_fused_variants_fp8 : nvlink::num_fused_variants;
        if (call.variant < 0 || call.variant >= variants || !nvlink::is_routed(nvlink::variant_of(w_, call)))
            throw py::value_error("variant " + std::to_string(call.variant) + " does not exist for the routed operations");
        const bool product = stages & nvlink::ROUTED_PRODUCT;
        if (product && !w_.quantised) throw py::value_error("stages: the product of gathered rows is there for e4m3 alone");
        if (!w_.quantised || call.refused || w_.num_local == 0 || result.rows == 0) return;
        const bool activates = stages & nvlink::ROUTED_GATHER, scatters = stages & nvlink::ROUTED_SCATTER;
        if (((activates || product) && !call.w13_scales) || (scatters && !call.w2_scales))
            throw py::value_error("an e4m3 call wants the scales of its weights");
        if ((activates || scatters) && (!result.scales || scales_stride < result.rows || scales_stride % 4 != 0))
            throw py::value_error("an e4m3 call wants activated_scales whose stride is a multiple of 4 and holds " +
                                  std::to_string(result.rows) + " rows, got " + std::to_string(scales_stride));
    }
    nvlink::workspace_view w_;
};

}  // namespace

void add_nvlink_ops(py::module_ &m) {
    py::list dense;
    for (int i = 0; i < nvlink::num_dense_variants; ++i) dense.append(nvlink::dense_variants[i].row_block);
    m.attr("DENSE_ROW_BLOCKS") = py::tuple(dense);
    m.attr("NUM_DENSE_WORDS") = int(nvlink::NUM_DENSE_WORDS);
    py::class_<dense_workspace>(m, "DenseWorkspace", py::module_local())
        .def(py::init<const py::dict &>(), py::arg("fields"))
        .def("run", &dense_workspace::run, py::arg("call"), py::kw_only(), py::arg("gathers"), py::arg("stages"), py::arg("timeout_s"),
             py::arg("stream"));
    py::class_<routed_workspace>(m, "RoutedWorkspace", py::module_local())
        .def(py::init<const py::dict &>(), py::arg("fields"))
        .def("run", &routed_workspace::run, py::arg("call"), py::kw_only(), py::arg("stages"), py::arg("timeout_s"), py::arg("stream"));
}

}  // namespace moe_tk::bindings
