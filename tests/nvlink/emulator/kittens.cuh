// In place of thunderkittens/kittens.cuh: what tk_kernels/nvlink uses of it, on the emulated machine.
#pragma once

#include "machine.hpp"

namespace kittens {

using bf16 = __nv_bfloat16;
using fp8e4m3 = __nv_fp8_e4m3;

template <class Int> constexpr Int ceil_div(Int a, Int b) { return (a + b - 1) / b; }
inline int laneid() { return emulator::current->lane; }
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }
inline void fence_proxy_async() {}
inline void fence_proxy_async_global() {}
inline uint32_t load_acquire_gpu(const uint32_t *word) { return *static_cast<const volatile uint32_t *>(word); }
inline void wait_prerequisite_grids() {}  // the emulated stream starts what may start
inline void launch_dependent_grids() {}

struct semaphore {
    int need, come;
    int64_t bytes;
    uint32_t phase;
};
struct bulk_load { void *to; const void *from; uint32_t bytes; };
inline std::map<semaphore *, std::vector<bulk_load>> loads_on_their_way;

inline void pass(semaphore &s) {
    if (s.come != s.need || s.bytes != 0) return;
    s.come = 0, ++s.phase;
    emulator::something_happened();
}
inline void init_semaphore(semaphore &s, int need) { s = {need, 0, 0, 0}; }
inline void wait(semaphore &s, uint32_t phase) {
    while ((s.phase & 1) == phase) {
        auto found = loads_on_their_way.find(&s);
        if (found == loads_on_their_way.end()) {  // whoever loads has not come so far
            ++emulator::idle, emulator::yield();
            continue;
        }
        for (const bulk_load &l : found->second) std::memcpy(l.to, l.from, l.bytes), s.bytes -= l.bytes;
        loads_on_their_way.erase(found);
        pass(s);
    }
}

namespace tma {

inline void check_bulk(const void *to, const void *from, uint32_t bytes) {
    const bool whole = uintptr_t(to) % 16 == 0 && uintptr_t(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0;
    if (!whole) emulator::fail("a bulk copy that is not in units of 16 bytes");
}
inline void expect_bytes(semaphore &s, uint32_t bytes) { s.bytes += bytes, ++s.come, pass(s); }
template <class T> void load_bulk_async(T *to, const T *from, uint32_t bytes, semaphore &s) {
    check_bulk(to, from, bytes);
    loads_on_their_way[&s].push_back({to, from, bytes});
}
template <class T> void store_bulk_async(T *to, const T *from, uint32_t bytes) {
    check_bulk(to, from, bytes);
    emulator::current->store_groups.back().push_back({to, from, bytes});
}
inline void store_commit_group() { emulator::current->store_groups.emplace_back(); }
template <int N = 0> void store_async_wait() { emulator::complete_stores(N); }

}  // namespace tma
}  // namespace kittens
