// Python bindings of the fused layer over NVLink. Device pointers and streams are integers; nothing here includes torch.
// with: tk_kernels/nvlink/open_call.cu tk_kernels/nvlink/fused_gemm.cu tk_kernels/nvlink/fused_gemm_fp8.cu
// with: tk_kernels/bindings/nvlink_ops.cu tk_kernels/nvlink/dense.cu tk_kernels/nvlink/routed_ops.cu tk_kernels/nvlink/serial.cu
// with: tk_kernels/nvlink/routed_ops_fp8.cu tk_kernels/nvlink/serial_fp8.cu
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../nvlink/layer.cuh"
#include "../patterns/grouped_gemm.cuh"
#include "fields.hpp"
#include "nvlink_ops.hpp"
#ifdef MOE_TK_TRACE
#include "../nvlink/clock_sync.cuh"
#define MODULE_NAME moe_tk_nvlink_traced
#else
#define MODULE_NAME moe_tk_nvlink
#endif

namespace py = pybind11;
using namespace moe_tk;

namespace {

nvlink::call_view read_call(bindings::fields &f) {
    nvlink::call_view c{};
    const auto bases = f.get<std::vector<uintptr_t>>("bases");
    c.world = int(bases.size());
    if (c.world < 1 || c.world > nvlink::MAX_WORLD) throw py::value_error("bases: wanted 1.." + std::to_string(nvlink::MAX_WORLD) + " ranks");
    for (int r = 0; r < c.world; ++r) c.base[r] = reinterpret_cast<char *>(bases[r]);
    c.at = {.control = f.get<int64_t>("control"), .headers = f.get<int64_t>("headers"), .posted = f.get<int64_t>("posted"),
            .rows_posted = f.get<int64_t>("rows_posted"), .routing = f.get<int64_t>("routing"),
            .rows = f.get<int64_t>("rows"),
            .combined = f.get<int64_t>("combined"), .planes = f.get<int64_t>("planes")};
    c.host = f.pointer<nvlink::mailbox>("mailbox");
    c.record_claim = f.pointer<uint32_t>("record_claim");
    c.epoch_ptr = f.pointer<const uint32_t>("epoch");
    c.rank = f.get<int>("rank"), c.max_tokens = f.get<int>("max_tokens"), c.top_k = f.get<int>("top_k");
    c.hidden = f.get<int>("hidden"), c.row_bytes = f.get<int>("row_bytes"), c.job_chunk = f.get<int>("job_chunk"), c.job_chunks = f.get<int>("job_chunks");
    return c;
}

nvlink::table_view read_tables(bindings::fields &f) {
    return {.counts = f.pointer<int>("counts"), .expert_offsets = f.pointer<int>("expert_offsets"), .slots = f.pointer<int>("slots"),
            .slot_pair = f.pointer<int>("slot_pair"), .slot_weight = f.pointer<float>("slot_weight"),
            .block_target = f.pointer<int>("block_target"), .block_group = f.pointer<int>("block_group"),
            .job_order = f.pointer<int>("job_order"), .chunk_expected = f.pointer<int>("chunk_expected"),
            .expert_load = f.pointer<int>("expert_load"), .load_total = f.pointer<long long>("load_total"), .contributors = f.pointer<long long>("contributors"),
            .token_counts = f.pointer<int>("token_counts"), .tasks1 = f.pointer<int4>("tasks1"),
            .tasks2 = f.pointer<int4>("tasks2")};
}

nvlink::workspace_view read_workspace(const py::dict &values) {
    bindings::fields f(values, "workspace");
    nvlink::workspace_view w{};
    w.call = read_call(f);
    w.tables = read_tables(f);
    w.counters = {.l1_done = f.pointer<uint32_t>("l1_done"), .l2_done = f.pointer<uint32_t>("l2_done"),
                  .job_done = f.pointer<uint32_t>("job_done"), .next_item = f.pointer<uint32_t>("next_item")};
    w.epoch = f.pointer<uint32_t>("epoch"), w.blocks_done = f.pointer<uint32_t>("blocks_done");
    w.copies_done = f.pointer<uint32_t>("copies_done"), w.routing_sent = f.pointer<uint32_t>("routing_sent");
    w.rows = f.pointer<void>("slot_rows"), w.slot_scales = f.pointer<float>("slot_scales"), w.activated = f.pointer<void>("activated");
    w.expert_out = f.pointer<void>("expert_out");
    w.activated_scales = f.pointer<float>("activated_scales"), w.quantised = w.call.keeps_own = f.get<bool>("quantised");
    w.num_experts = f.get<int>("num_experts"), w.first_expert = f.get<int>("first_expert"), w.num_local = f.get<int>("num_local");
    w.tensor_parallel = f.get<bool>("tensor_parallel"), w.max_slots = w.scales_stride = f.get<int>("max_slots"), w.max_blocks = f.get<int>("max_blocks");
    w.intermediate = f.get<int>("intermediate"), w.num_sms = f.get<int>("num_sms");
#ifdef MOE_TK_TRACE
    w.call.stamps = {.headers = f.pointer<stamp_header>("stamp_headers"), .records = f.pointer<stamp_record>("stamp_records"),
                     .blocks = f.get<uint32_t>("stamp_blocks"), .capacity = f.get<uint32_t>("stamp_capacity")};
#endif
    f.done();
    return w;
}

nvlink::plain_gemm read_plain(bindings::fields &f, const char *tile, const char *policy, bool quantised, bool activates) {
    const nvlink::plain_gemm plain{.tile = f.get<int>(tile), .weights_policy = f.get<int>(policy)};
    const variant_list tiles = nvlink::plain_tiles(quantised);
    if (plain.tile < -1 || plain.tile >= tiles.count)
        throw py::value_error(std::string(tile) + " " + std::to_string(plain.tile) + " does not exist");
    if (plain.tile >= 0 && !tiles.variants[plain.tile].launch[activates])
        throw py::value_error(std::string(tile) + " " + tiles.variants[plain.tile].name + " has no SwiGLU");
    return plain;
}

// Both GEMMs of a call are fused, or both plain with the same row block.
void check_tiles(const nvlink::layer_call &call, int stages, bool quantised) {
    const int first = call.gemm1.tile, second = call.gemm2.tile;
    const int fused = nvlink::STAGE_GATHER | nvlink::STAGE_SCATTER, all = 2 * nvlink::STAGE_COMBINE - 1;
    if (call.variant < 0 || call.variant >= (quantised ? nvlink::num_fused_variants_fp8 : nvlink::num_fused_variants))
        throw py::value_error("variant " + std::to_string(call.variant) + " does not exist");
    if ((first < 0) != (second < 0)) throw py::value_error("gemm1_tile and gemm2_tile: wanted both or none");
    const gemm_variant *tiles = nvlink::plain_tiles(quantised).variants;
    if (first >= 0 && tiles[first].block_m != tiles[second].block_m)
        throw py::value_error("gemm1_tile and gemm2_tile share the slots and their row blocks");
    const int wrong = first < 0 ? all & ~fused & ~nvlink::STAGE_OPEN : fused;
    if (stages & ~all || stages & wrong)
        throw py::value_error("stages " + std::to_string(stages) + " are not of the " + (first < 0 ? "fused" : "serial") + " pattern");
}

// One workspace: sizes and addresses that never change, and the launches on it.
class workspace {
  public:
    explicit workspace(const py::dict &values) : w_(read_workspace(values)) {
        nvlink::prepare_open_call();
        nvlink::prepare_serial();
        for (int i = 0; i < nvlink::num_fused_variants; ++i) nvlink::fused_variants[i].prepare();
        for (int i = 0; i < nvlink::num_fused_variants_fp8; ++i) nvlink::fused_variants_fp8[i].prepare();
    }
    // Launches the stages of `stages` (nvlink::stage_bit) on `stream`, in the order of their bits; returns at once.
    void run(const py::dict &values, int stages, double timeout_s, uint64_t stream) {
        bindings::fields f(values, "call");
        const nvlink::layer_call call{
            .hidden_states = f.pointer<void>("hidden_states"), .topk_ids = f.pointer<void>("topk_ids"),
            .topk_weights = f.pointer<void>("topk_weights"), .hidden_scales = f.pointer<float>("hidden_scales"), .out = f.pointer<void>("out"), .w13 = f.pointer<void>("w13"),
            .w2 = f.pointer<void>("w2"), .w13_scales = f.pointer<void>("w13_scales"), .w2_scales = f.pointer<void>("w2_scales"), .signature = f.get<uint64_t>("signature"), .num_tokens = f.get<int>("num_tokens"),
            .refused = f.get<bool>("refused"), .ids_are_64 = f.get<bool>("ids_are_64"),
            .weights_are_bf16 = f.get<bool>("weights_are_bf16"), .variant = f.get<int>("variant"), .segments = f.get<int>("segments"),
            .passes = f.get<int>("passes"),
            .weights_before_l2 = f.get<bool>("weights_before_l2"), .alpha = f.get<float>("alpha"), .beta = f.get<float>("beta"),
            .limit = f.get<float>("limit"), .export_blocks = f.get<int>("export_blocks"),
            .gemm1 = read_plain(f, "gemm1_tile", "gemm1_policy", w_.quantised, true),
            .gemm2 = read_plain(f, "gemm2_tile", "gemm2_policy", w_.quantised, false)};
        f.done();
        check_tiles(call, stages, w_.quantised);
        if (call.passes < 1 || call.passes > nvlink::MAX_COL_GROUPS)
            throw py::value_error("passes: wanted 1.." + std::to_string(nvlink::MAX_COL_GROUPS) + ", got " + std::to_string(call.passes));
        nvlink::workspace_view w = w_;
        w.call.timeout_ns = uint64_t(timeout_s * 1e9);
        const auto s = reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream));
        forget_stamps(stages, s);
        if (stages & nvlink::STAGE_OPEN) nvlink::launch_open_call(w, call, s);
        if (stages & nvlink::STAGE_GATHER) nvlink::variant_of(w, call).gather(w, call, stages & nvlink::STAGE_OPEN, s);
        if (stages & nvlink::STAGE_SCATTER) nvlink::variant_of(w, call).scatter(w, call, stages & nvlink::STAGE_GATHER, s);
        if (stages & nvlink::STAGE_PULL) nvlink::launch_pull(w, call, stages & nvlink::STAGE_OPEN, s);
        if (stages & nvlink::STAGE_GEMM1) nvlink::launch_gemm1(w, call, s);
        if (stages & nvlink::STAGE_GEMM2) nvlink::launch_gemm2(w, call, s);
        if (stages & nvlink::STAGE_COMBINE) nvlink::launch_combine(w, call, s);
    }

  private:
    // A traced call starts with empty headers: not every block of the call before takes part in this one.
    void forget_stamps([[maybe_unused]] int stages, [[maybe_unused]] cudaStream_t stream) const {
#ifdef MOE_TK_TRACE
        const stamp_buffer &b = w_.call.stamps;
        if (stages & nvlink::STAGE_OPEN)
            cudaMemsetAsync(b.headers, 0, sizeof(stamp_header) * STAMP_KERNELS * STAMP_WRITERS * b.blocks, stream);
#endif
    }

    nvlink::workspace_view w_;
};

py::list list_variants(bool quantised) {
    py::list out;
    for (int i = 0; i < (quantised ? nvlink::num_fused_variants_fp8 : nvlink::num_fused_variants); ++i) {
        const auto &v = (quantised ? nvlink::fused_variants_fp8 : nvlink::fused_variants)[i];
        py::dict d;
        d["name"] = v.name, d["row_block"] = v.row_block, d["gather_cols"] = v.gather_cols;
        d["scatter_cols"] = v.scatter_cols, d["placed"] = v.placed, d["gather_shared"] = v.gather_shared, d["scatter_shared"] = v.scatter_shared;
        out.append(d);
    }
    return out;
}

py::list list_plain_tiles(bool quantised) {
    const variant_list tiles = nvlink::plain_tiles(quantised);
    py::list out;
    for (int i = 0; i < tiles.count; ++i) {
        const auto &v = tiles.variants[i];
        py::dict d;
        d["name"] = v.name, d["row_block"] = v.block_m, d["columns"] = v.block_n, d["shared"] = v.smem;
        d["activates"] = v.launch[1] != nullptr;
        out.append(d);
    }
    return out;
}

}  // namespace

namespace moe_tk::bindings {
nvlink::workspace_view workspace_of(const py::dict &values) { return read_workspace(values); }
}  // namespace moe_tk::bindings

PYBIND11_MODULE(MODULE_NAME, m) {
    m.doc() = "The fused MoE layer over NVLink; device pointers and streams are integers";
    m.attr("CONTROL_BYTES") = sizeof(protocol::control_block);
    m.attr("MAILBOX_BYTES") = sizeof(nvlink::mailbox);
    m.attr("FLAG_LINE_BYTES") = nvlink::FLAG_LINE * 4;
    m.attr("MAX_GROUPS") = nvlink::MAX_GROUPS;
    m.attr("MAX_COL_GROUPS") = nvlink::MAX_COL_GROUPS;
    m.attr("OPEN_CLUSTER") = nvlink::OPEN_CLUSTER;
    m.attr("MAX_TOKENS") = nvlink::MAX_TOKENS;
    m.def("variants", &list_variants, py::arg("quantised") = false, "The compiled pairs of fused GEMMs of bf16 or e4m3, by index");
    m.def("plain_tiles", &list_plain_tiles, py::arg("quantised") = false, "The tiles of the serial pattern's GEMMs of bf16 or e4m3, by index");
    py::class_<workspace>(m, "Workspace", py::module_local())  // a traced module may be loaded as well
        .def(py::init<const py::dict &>(), py::arg("fields"))
        .def("run", &workspace::run, py::arg("call"), py::kw_only(), py::arg("stages"), py::arg("timeout_s"), py::arg("stream"));
    bindings::add_nvlink_ops(m);
#ifdef MOE_TK_TRACE
    m.attr("STAMP_KINDS") = int(stamp_kind::reduce) + 1;
    m.attr("STAMP_KERNELS") = STAMP_KERNELS;
    m.attr("STAMP_WRITERS") = STAMP_WRITERS;
    m.def("clock_sync", [](uintptr_t mine, uintptr_t theirs, bool asks, uint32_t first_round, int rounds, uintptr_t samples, uint64_t stream) {
        nvlink::launch_clock_sync(reinterpret_cast<nvlink::clock_words *>(mine), reinterpret_cast<nvlink::clock_words *>(theirs), asks,
                                  first_round, rounds, reinterpret_cast<uint64_t *>(samples), reinterpret_cast<cudaStream_t>(stream));
    }, py::arg("mine"), py::arg("theirs"), py::kw_only(), py::arg("asks"), py::arg("first_round"), py::arg("rounds"),
       py::arg("samples"), py::arg("stream"));
#endif
}
