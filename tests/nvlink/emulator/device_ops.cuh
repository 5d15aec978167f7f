// In place of tk_kernels/nvlink/device_ops.cuh: the same names on the emulated machine.
#pragma once

#include "machine.hpp"

namespace moe_tk::nvlink {

inline uint32_t load_acquire_sys(const uint32_t *word) { return *static_cast<const volatile uint32_t *>(word); }
inline uint32_t load_relaxed_sys(const uint32_t *word) { return *static_cast<const volatile uint32_t *>(word); }
inline uint64_t load_relaxed_sys(const uint64_t *word) { return *static_cast<const volatile uint64_t *>(word); }
inline uint32_t fetch_add_acq_rel_gpu(uint32_t *word, uint32_t value) {
    emulator::something_happened();
    return atomicAdd(word, value);
}
inline uint32_t fetch_add_relaxed_gpu(uint32_t *word, uint32_t value) { return fetch_add_acq_rel_gpu(word, value); }
inline void add_release_gpu(uint32_t *word, uint32_t value) { fetch_add_acq_rel_gpu(word, value); }
inline uint32_t exchange_acq_rel_gpu(uint32_t *word, uint32_t value) {
    emulator::something_happened();
    return std::exchange(*word, value);
}
inline void store_release_sys(uint32_t *word, uint32_t value) { exchange_acq_rel_gpu(word, value); }
inline void store_relaxed_sys(uint32_t *word, uint32_t value) { exchange_acq_rel_gpu(word, value); }
inline uint32_t fetch_inc_wrap_acq_rel_gpu(uint32_t *word, uint32_t most) {
    return exchange_acq_rel_gpu(word, *word >= most ? 0 : *word + 1);
}
inline void fence_sys() {}
inline void cluster_arrive_release() {}
inline void cluster_arrive_relaxed() {}
inline void cluster_wait_acquire() { emulator::meet(*emulator::current->of_cluster); }
inline uint64_t now_ns() { return emulator::now; }
inline void nap_ns(uint32_t) {
    ++emulator::now, ++emulator::idle;
    emulator::yield();
}

}  // namespace moe_tk::nvlink
