// Python bindings of the CUDA kernels. Device pointers and streams are integers; nothing here includes torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../patterns/grouped_gemm.cuh"

namespace py = pybind11;

namespace {

template <class T> T *device_pointer(uint64_t address) { return reinterpret_cast<T *>(static_cast<uintptr_t>(address)); }

py::list list_variants() {
    py::list out;
    for (int i = 0; i < moe_tk::num_bf16_variants; ++i) {
        const auto &v = moe_tk::bf16_variants[i];
        py::dict d;
        d["index"] = i, d["name"] = v.name, d["block_m"] = v.block_m, d["block_n"] = v.block_n, d["stages"] = v.stages;
        d["cluster"] = v.cluster, d["shared_bytes"] = v.smem;
        out.append(d);
    }
    return out;
}

void run_grouped_gemm(int variant, bool swiglu, uint64_t tokens, uint64_t weights, uint64_t out, int num_slots, int n, int k,
                      int num_experts, int64_t tokens_stride, int64_t out_stride, uint64_t group_offsets, int num_groups,
                      uint64_t tasks, uint64_t num_tasks_ptr, int num_tasks, uint64_t block_rows, float alpha, float beta,
                      float limit, uint64_t slot_weight, int num_sms, int weights_policy, uint64_t stream) {
    if (variant < 0 || variant >= moe_tk::num_bf16_variants)
        throw py::value_error("variant " + std::to_string(variant) + " is not in [0, " +
                              std::to_string(moe_tk::num_bf16_variants) + ")");
    const moe_tk::gemm_args args{
        .tokens = device_pointer<void>(tokens), .weights = device_pointer<void>(weights), .out = device_pointer<void>(out),
        .num_slots = num_slots, .n = n, .k = k, .num_experts = num_experts, .tokens_stride = tokens_stride,
        .out_stride = out_stride, .group_offsets = device_pointer<const int>(group_offsets), .num_groups = num_groups,
        .tasks = device_pointer<const int>(tasks), .num_tasks_ptr = device_pointer<const int>(num_tasks_ptr),
        .num_tasks = num_tasks, .block_rows = device_pointer<const int>(block_rows), .alpha = alpha, .beta = beta,
        .limit = limit, .slot_weight = device_pointer<const float>(slot_weight), .num_sms = num_sms,
        .weights_policy = weights_policy};
    const auto launch = moe_tk::bf16_variants[variant].launch[tasks != 0][swiglu];
    launch(args, reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(stream)));
}

}  // namespace

PYBIND11_MODULE(MOE_TK_MODULE_NAME, m) {
    m.doc() = "CUDA kernels of moe_tk; device pointers and streams are integers";
    m.def("gemm_variants", &list_variants, "The compiled grouped GEMM configurations, by index");
    m.def("grouped_gemm", &run_grouped_gemm, py::kw_only(), py::arg("variant"), py::arg("swiglu"), py::arg("tokens"),
          py::arg("weights"), py::arg("out"), py::arg("num_slots"), py::arg("n"), py::arg("k"), py::arg("num_experts"),
          py::arg("tokens_stride"), py::arg("out_stride"), py::arg("group_offsets"), py::arg("num_groups"),
          py::arg("tasks") = 0, py::arg("num_tasks_ptr") = 0, py::arg("num_tasks") = 0, py::arg("block_rows") = 0,
          py::arg("alpha") = 1.0f, py::arg("beta") = 0.0f, py::arg("limit") = std::numeric_limits<float>::infinity(),
          py::arg("slot_weight") = 0, py::arg("num_sms"), py::arg("weights_policy") = 0, py::arg("stream"),
          "Launches the grouped GEMM on `stream`; see moe_tk.ops.grouped_gemm for the meaning of each argument");
}
