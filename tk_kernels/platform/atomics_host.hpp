// Memory-order primitives, host side: over std::atomic_ref. On the host every scope is the coherent memory of the machine,
// also across processes that map one segment. Include platform.hpp, not this.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>

namespace moe_tk::platform::host_side {

template <scope, class T>
inline T load_acquire(const T *word) {
    return std::atomic_ref<T>(*const_cast<T *>(word)).load(std::memory_order_acquire);
}

template <scope, class T>
inline T load_relaxed(const T *word) {
    return std::atomic_ref<T>(*const_cast<T *>(word)).load(std::memory_order_relaxed);
}

template <scope, class T>
inline void store_release(T *word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_release);
}

template <scope, class T>
inline void store_relaxed(T *word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_relaxed);
}

template <scope, class T>
inline T fetch_add_acq_rel(T *word, T value) {
    return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_acq_rel);
}

template <scope, class T>
inline T exchange_acq_rel(T *word, T value) {
    return std::atomic_ref<T>(*word).exchange(value, std::memory_order_acq_rel);
}

template <scope, class T>
inline void red_release(T *word, T value) {
    std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_release);
}

// No host path depends on it (signals are release stores), so it costs nothing that ThreadSanitizer does not know fences.
template <scope>
inline void fence() {
    std::atomic_thread_fence(std::memory_order_acq_rel);
}

inline void fence_proxy_async() {}

inline void copy_bytes(void *to, const void *from, int64_t bytes, int lane, int lanes) {
    const int64_t share = (bytes + lanes - 1) / lanes, first = share * lane;
    const int64_t count = bytes - first < share ? bytes - first : share;
    if (count > 0) std::memcpy(static_cast<char *>(to) + first, static_cast<const char *>(from) + first, size_t(count));
}

inline uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000ull + uint64_t(now.tv_nsec);
}

inline void nap_ns(uint32_t duration_ns) {
    const timespec pause{0, long(duration_ns)};
    nanosleep(&pause, nullptr);
}

}  // namespace moe_tk::platform::host_side
