// Python bindings of the grouped GEMM. Device pointers and streams are integers; nothing here includes torch.
// with: tk_kernels/patterns/build_tasks.cu tk_kernels/patterns/grouped_gemm.cu tk_kernels/patterns/grouped_gemm_fp8.cu
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "../patterns/grouped_gemm.cuh"

namespace py = pybind11;

namespace {

template <class T> T *device_pointer(uint64_t address) { return reinterpret_cast<T *>(static_cast<uintptr_t>(address)); }

moe_tk::variant_list variants_of(const std::string &dtype) {
    if (dtype == "bf16") return moe_tk::bf16_variants();
    if (dtype == "e4m3") return moe_tk::fp8_variants();
    throw py::value_error("dtype is " + dtype + ", wanted bf16 or e4m3");
}

py::list list_variants(const std::string &dtype) {
    const moe_tk::variant_list list = variants_of(dtype);
    py::list out;
    for (int i = 0; i < list.count; ++i) {
        const moe_tk::gemm_variant &v = list.variants[i];
        py::dict d;
        d["index"] = i, d["name"] = v.name, d["block_m"] = v.block_m, d["block_n"] = v.block_n, d["stages"] = v.stages;
        d["cluster"] = v.cluster, d["shared_bytes"] = v.smem;
        d["swiglu"] = v.launch[1] != nullptr, d["hooked"] = v.hooked[0] != nullptr;
        out.append(d);
    }
    return out;
}

void run_grouped_gemm(const std::string &dtype, int variant, bool swiglu, uint64_t tokens, uint64_t weights, uint64_t out,
                      int num_slots, int n, int k, int num_experts, int64_t tokens_stride, int64_t out_stride,
                      uint64_t tasks, uint64_t num_tasks_ptr, int num_tasks,
                      uint64_t block_rows, float alpha, float beta, float limit, uint64_t slot_weight, uint64_t token_scales,
                      int64_t token_scales_stride, uint64_t weight_scales, uint64_t out_scales, int64_t out_scales_stride,
                      uint64_t gate_arrived, uint64_t gate_want, uint64_t gate_timeout_ns, uint64_t gate_record,
                      uint64_t push_finished, int num_sms, int weights_policy, uint64_t stream) {
    const moe_tk::variant_list list = variants_of(dtype);
    if (variant < 0 || variant >= list.count)
        throw py::value_error("variant " + std::to_string(variant) + " is not in [0, " + std::to_string(list.count) + ")");
    const moe_tk::gemm_args args{
        .tokens = device_pointer<void>(tokens), .weights = device_pointer<void>(weights), .out = device_pointer<void>(out),
        .num_slots = num_slots, .n = n, .k = k, .num_experts = num_experts, .tokens_stride = tokens_stride,
        .out_stride = out_stride,
        .tasks = device_pointer<const int>(tasks), .num_tasks_ptr = device_pointer<const int>(num_tasks_ptr),
        .num_tasks = num_tasks, .block_rows = device_pointer<const int>(block_rows), .alpha = alpha, .beta = beta,
        .limit = limit, .slot_weight = device_pointer<const float>(slot_weight),
        .token_scales = device_pointer<const float>(token_scales), .token_scales_stride = token_scales_stride,
        .weight_scales = device_pointer<const void>(weight_scales), .out_scales = device_pointer<float>(out_scales),
        .out_scales_stride = out_scales_stride, .gate_arrived = device_pointer<const uint32_t>(gate_arrived),
        .gate_want = device_pointer<const uint32_t>(gate_want), .gate_timeout_ns = gate_timeout_ns,
        .gate_record = device_pointer<void>(gate_record), .push_finished = device_pointer<uint32_t>(push_finished),
        .num_sms = num_sms, .weights_policy = weights_policy};
    const moe_tk::gemm_variant &v = list.variants[variant];
    const bool hooked = gate_arrived != 0;
    if (tasks == 0) throw py::value_error("tasks is a null pointer: a grouped GEMM walks a task table");
    if (hooked && (!gate_want || !gate_record || !push_finished))
        throw py::value_error("hooks want gate_want, gate_record and push_finished");
    const auto launch = hooked ? v.hooked[swiglu] : v.launch[swiglu];
    if (launch == nullptr)
        throw py::value_error(std::string(v.name) + " has no " + (hooked ? "hooked" : "SwiGLU") + " form");
    launch(args, reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)));
}

void run_build_tasks(uint64_t group_offsets, uint64_t group_rows, int num_groups, int num_experts, int num_col_blocks,
                     int block_m, uint64_t tasks, uint64_t num_tasks, uint64_t block_rows, uint64_t stream) {
    moe_tk::build_tasks({.group_offsets = device_pointer<const int>(group_offsets),
                         .group_rows = device_pointer<const int>(group_rows), .num_groups = num_groups,
                         .num_experts = num_experts, .num_col_blocks = num_col_blocks, .block_m = block_m,
                         .tasks = device_pointer<int>(tasks), .num_tasks = device_pointer<int>(num_tasks),
                         .block_rows = device_pointer<int>(block_rows)},
                        reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)));
}

}  // namespace

PYBIND11_MODULE(moe_tk_gemm, m) {
    m.doc() = "The grouped GEMM engine; device pointers and streams are integers";
    m.def("gemm_variants", &list_variants, py::arg("dtype"), "The compiled grouped GEMM configurations of bf16 or e4m3, by index");
    m.def("build_tasks", &run_build_tasks, py::kw_only(), py::arg("group_offsets"), py::arg("group_rows"), py::arg("num_groups"),
          py::arg("num_experts"), py::arg("num_col_blocks"), py::arg("block_m"), py::arg("tasks"), py::arg("num_tasks"),
          py::arg("block_rows"), py::arg("stream"), "Launches the builder of a task table on `stream`");
    m.def("grouped_gemm", &run_grouped_gemm, py::kw_only(), py::arg("dtype"), py::arg("variant"), py::arg("swiglu"),
          py::arg("tokens"), py::arg("weights"), py::arg("out"), py::arg("num_slots"), py::arg("n"), py::arg("k"),
          py::arg("num_experts"), py::arg("tokens_stride"), py::arg("out_stride"), py::arg("tasks"), py::arg("num_tasks_ptr") = 0, py::arg("num_tasks") = 0,
          py::arg("block_rows") = 0, py::arg("alpha") = 1.0f, py::arg("beta") = 0.0f,
          py::arg("limit") = std::numeric_limits<float>::infinity(), py::arg("slot_weight") = 0, py::arg("token_scales") = 0,
          py::arg("token_scales_stride") = 0, py::arg("weight_scales") = 0, py::arg("out_scales") = 0,
          py::arg("out_scales_stride") = 0, py::arg("gate_arrived") = 0, py::arg("gate_want") = 0,
          py::arg("gate_timeout_ns") = 0, py::arg("gate_record") = 0, py::arg("push_finished") = 0, py::arg("num_sms"),
          py::arg("weights_policy") = 0, py::arg("stream"),
          "Launches the grouped GEMM on `stream`; see moe_tk.runtime.gemm for the meaning of each argument");
}
