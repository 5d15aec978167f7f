// Where the results of dispatch_gemm go: tensors of the caller.
#pragma once

namespace moe_tk::nvlink {

struct dispatch_result {
    void *activated;       // [rows, I]
    float *scales;         // e4m3: [I / 128, rows] of it, else nullptr
    int *expert_offsets;   // [E_local + 1], or nullptr: not wanted
    int *slots;            // [R * stride, k]
    int rows, stride;      // rows <= max_slots, stride <= max_tokens
    int row_bytes;         // a multiple of 16
};

}  // namespace moe_tk::nvlink
