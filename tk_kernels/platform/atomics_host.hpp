// Memory-order primitives, host side: the same names and meaning as the device side, over std::atomic_ref.
// On the host every scope is the coherent memory of the machine, also across processes that map one segment.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace moe_tk::platform {

enum class scope { block, device, system };

template <scope S, class T>
inline T load_acquire(const T *word) {
    return std::atomic_ref<T>(*const_cast<T *>(word)).load(std::memory_order_acquire);
}

template <scope S, class T>
inline T load_relaxed(const T *word) {
    return std::atomic_ref<T>(*const_cast<T *>(word)).load(std::memory_order_relaxed);
}

template <scope S, class T>
inline void store_release(T *word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_release);
}

template <scope S, class T>
inline void store_relaxed(T *word, T value) {
    std::atomic_ref<T>(*word).store(value, std::memory_order_relaxed);
}

template <scope S, class T>
inline T fetch_add_acq_rel(T *word, T value) {
    return std::atomic_ref<T>(*word).fetch_add(value, std::memory_order_acq_rel);
}

template <scope S, class T>
inline T exchange_acq_rel(T *word, T value) {
    return std::atomic_ref<T>(*word).exchange(value, std::memory_order_acq_rel);
}

template <scope S>
inline void fence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Wall clock that does not jump (ns). One clock for all processes of the machine.
inline uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000ull + uint64_t(now.tv_nsec);
}

inline void nap_ns(uint32_t duration_ns) {
    const timespec pause{0, long(duration_ns)};
    nanosleep(&pause, nullptr);
}

}  // namespace moe_tk::platform
