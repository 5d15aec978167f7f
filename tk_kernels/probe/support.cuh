// What every probe needs on the host: errors as text, buffers that free themselves, peer access, bounded waits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "ptx.cuh"

#define MOE_TK_PROBE_API extern "C" __attribute__((visibility("default")))

namespace moe_tk_probe {

inline constexpr int HOST = -1; // stands for pinned host memory wherever a device index is expected

std::string &last_error(); // of this thread; defined in errors.cu

inline void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(code) + " (" + cudaGetErrorString(code) + ")");
    }
}
#define MOE_TK_PROBE_CHECK(call) ::moe_tk_probe::check((call), #call)

// Runs body and turns exceptions into return code 1 plus text for moe_tk_probe_last_error().
template <class Body>
int guarded(Body &&body) {
    try {
        body();
        return 0;
    } catch (const std::exception &e) {
        last_error() = e.what();
        return 1;
    }
}

inline int attribute(cudaDeviceAttr what, int device) {
    int value = 0;
    MOE_TK_PROBE_CHECK(cudaDeviceGetAttribute(&value, what, device));
    return value;
}

inline bool has_bulk(int device) { return attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9; }

// One direction: kernels on `from` may address memory of `to`.
inline void enable_peer(int from, int to) {
    if (from == to || from == HOST || to == HOST) return;
    int can = 0;
    MOE_TK_PROBE_CHECK(cudaDeviceCanAccessPeer(&can, from, to));
    if (!can) {
        throw std::runtime_error("GPU " + std::to_string(from) + " cannot map GPU " + std::to_string(to) +
                                 " (no peer access)");
    }
    MOE_TK_PROBE_CHECK(cudaSetDevice(from));
    cudaError_t code = cudaDeviceEnablePeerAccess(to, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
    } else {
        check(code, "cudaDeviceEnablePeerAccess");
    }
}

// Device memory on `device`, or pinned host memory mapped for every GPU when device == HOST.
class buffer {
public:
    buffer() = default;
    buffer(int device, size_t bytes) : device_(device), bytes_(bytes) {
        if (device == HOST) {
            MOE_TK_PROBE_CHECK(cudaHostAlloc(&pointer_, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
        } else {
            MOE_TK_PROBE_CHECK(cudaSetDevice(device));
            MOE_TK_PROBE_CHECK(cudaMalloc(&pointer_, bytes));
        }
    }
    buffer(buffer &&other) noexcept { *this = static_cast<buffer &&>(other); }
    buffer &operator=(buffer &&other) noexcept {
        std::swap(device_, other.device_);
        std::swap(bytes_, other.bytes_);
        std::swap(pointer_, other.pointer_);
        return *this;
    }
    ~buffer() {
        if (!pointer_) return;
        if (device_ == HOST) {
            cudaFreeHost(pointer_);
        } else {
            cudaSetDevice(device_);
            cudaFree(pointer_);
        }
    }
    template <class T = char>
    T *as() const {
        return static_cast<T *>(pointer_);
    }
    size_t bytes() const { return bytes_; }
    int device() const { return device_; }
    void fill(int byte) const {
        if (device_ == HOST) {
            __builtin_memset(pointer_, byte, bytes_);
        } else {
            MOE_TK_PROBE_CHECK(cudaSetDevice(device_));
            MOE_TK_PROBE_CHECK(cudaMemset(pointer_, byte, bytes_));
            MOE_TK_PROBE_CHECK(cudaDeviceSynchronize());
        }
    }

private:
    int device_ = HOST;
    size_t bytes_ = 0;
    void *pointer_ = nullptr;
};

class stream {
public:
    explicit stream(int device) : device_(device) {
        MOE_TK_PROBE_CHECK(cudaSetDevice(device));
        MOE_TK_PROBE_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    }
    stream(stream &&other) noexcept : device_(other.device_), stream_(other.stream_) { other.stream_ = nullptr; }
    stream(const stream &) = delete;
    ~stream() {
        if (!stream_) return;
        cudaSetDevice(device_);
        cudaStreamDestroy(stream_);
    }
    cudaStream_t get() const { return stream_; }
    int device() const { return device_; }
    void wait() const {
        MOE_TK_PROBE_CHECK(cudaSetDevice(device_));
        MOE_TK_PROBE_CHECK(cudaStreamSynchronize(stream_));
    }

private:
    int device_;
    cudaStream_t stream_ = nullptr;
};

template <class T>
T read_back(const T *device_pointer) {
    T value;
    MOE_TK_PROBE_CHECK(cudaMemcpy(&value, device_pointer, sizeof(T), cudaMemcpyDefault));
    return value;
}

// Polls a word until it is at least `want` (wrap-safe) or limit_ns of wall clock is over; false on time-out.
__device__ inline bool wait_at_least(const uint32_t *word, uint32_t want, uint64_t limit_ns) {
    const uint64_t began = global_ns();
    while (static_cast<int32_t>(load_acquire_sys(word) - want) < 0) {
        if (global_ns() - began > limit_ns) return false;
    }
    return true;
}

} // namespace moe_tk_probe
