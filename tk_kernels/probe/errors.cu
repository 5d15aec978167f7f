// The text of the last error, and what the caller needs to know before it uses the rest.
#include "support.cuh"

namespace moe_tk_probe {

std::string &last_error() {
    thread_local std::string text;
    return text;
}

} // namespace moe_tk_probe

// Raised whenever an argument list below changes; the Python side refuses another number.
MOE_TK_PROBE_API int moe_tk_probe_abi() { return 1; }

MOE_TK_PROBE_API const char *moe_tk_probe_last_error() { return moe_tk_probe::last_error().c_str(); }

// out: devices, or 0 and an error text when CUDA cannot be used.
MOE_TK_PROBE_API int moe_tk_probe_devices(int *out) {
    return moe_tk_probe::guarded([&] { MOE_TK_PROBE_CHECK(cudaGetDeviceCount(out)); });
}

MOE_TK_PROBE_API int moe_tk_probe_device(int device, int *sm_count, int *has_bulk, int *shared_bytes) {
    return moe_tk_probe::guarded([&] {
        *sm_count = moe_tk_probe::attribute(cudaDevAttrMultiProcessorCount, device);
        *has_bulk = moe_tk_probe::has_bulk(device);
        *shared_bytes = moe_tk_probe::attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    });
}

// Creates the context now, so that the time it takes is not counted against a probe; later: fails in a poisoned one.
MOE_TK_PROBE_API int moe_tk_probe_warm(int device) {
    return moe_tk_probe::guarded([&] {
        MOE_TK_PROBE_CHECK(cudaSetDevice(device));
        MOE_TK_PROBE_CHECK(cudaFree(nullptr));
        MOE_TK_PROBE_CHECK(cudaDeviceSynchronize());
    });
}
