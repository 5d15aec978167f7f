// Memory-order primitives, device side: all inline PTX of the protocols is in this file. Every statement is volatile and has
// a "memory" clobber, so that the compiler moves no access across it. Addresses are generic, words uint32_t or uint64_t.
// Include platform.hpp, not this.
#pragma once

#include <cstdint>

namespace moe_tk::platform::device_side {

#define MOE_TK_DEVICE_FN __device__ __forceinline__

// "OP.<scope>REST" with the scope S of the enclosing function; then the operands.
#define MOE_TK_PTX(OP, REST, ...)                                                                  \
    if constexpr (S == scope::block) asm volatile(OP ".cta" REST __VA_ARGS__ : "memory");          \
    else if constexpr (S == scope::device) asm volatile(OP ".gpu" REST __VA_ARGS__ : "memory");    \
    else asm volatile(OP ".sys" REST __VA_ARGS__ : "memory")

template <scope S>
MOE_TK_DEVICE_FN uint32_t load_acquire(const uint32_t *at) {
    uint32_t value;
    MOE_TK_PTX("ld.acquire", ".u32 %0, [%1];", : "=r"(value) : "l"(at));
    return value;
}

template <scope S>
MOE_TK_DEVICE_FN uint64_t load_acquire(const uint64_t *at) {
    uint64_t value;
    MOE_TK_PTX("ld.acquire", ".u64 %0, [%1];", : "=l"(value) : "l"(at));
    return value;
}

template <scope S>
MOE_TK_DEVICE_FN uint32_t load_relaxed(const uint32_t *at) {
    uint32_t value;
    MOE_TK_PTX("ld.relaxed", ".u32 %0, [%1];", : "=r"(value) : "l"(at));
    return value;
}

template <scope S>
MOE_TK_DEVICE_FN uint64_t load_relaxed(const uint64_t *at) {
    uint64_t value;
    MOE_TK_PTX("ld.relaxed", ".u64 %0, [%1];", : "=l"(value) : "l"(at));
    return value;
}

template <scope S>
MOE_TK_DEVICE_FN void store_release(uint32_t *at, uint32_t value) {
    MOE_TK_PTX("st.release", ".u32 [%0], %1;", ::"l"(at), "r"(value));
}

template <scope S>
MOE_TK_DEVICE_FN void store_release(uint64_t *at, uint64_t value) {
    MOE_TK_PTX("st.release", ".u64 [%0], %1;", ::"l"(at), "l"(value));
}

template <scope S>
MOE_TK_DEVICE_FN void store_relaxed(uint32_t *at, uint32_t value) {
    MOE_TK_PTX("st.relaxed", ".u32 [%0], %1;", ::"l"(at), "r"(value));
}

template <scope S>
MOE_TK_DEVICE_FN void store_relaxed(uint64_t *at, uint64_t value) {
    MOE_TK_PTX("st.relaxed", ".u64 [%0], %1;", ::"l"(at), "l"(value));
}

template <scope S>
MOE_TK_DEVICE_FN uint32_t fetch_add_acq_rel(uint32_t *at, uint32_t value) {
    uint32_t before;
    MOE_TK_PTX("atom.acq_rel", ".add.u32 %0, [%1], %2;", : "=r"(before) : "l"(at), "r"(value));
    return before;
}

template <scope S>
MOE_TK_DEVICE_FN uint64_t fetch_add_acq_rel(uint64_t *at, uint64_t value) {
    uint64_t before;
    MOE_TK_PTX("atom.acq_rel", ".add.u64 %0, [%1], %2;", : "=l"(before) : "l"(at), "l"(value));
    return before;
}

template <scope S>
MOE_TK_DEVICE_FN uint32_t exchange_acq_rel(uint32_t *at, uint32_t value) {
    uint32_t before;
    MOE_TK_PTX("atom.acq_rel", ".exch.b32 %0, [%1], %2;", : "=r"(before) : "l"(at), "r"(value));
    return before;
}

template <scope S>
MOE_TK_DEVICE_FN uint64_t exchange_acq_rel(uint64_t *at, uint64_t value) {
    uint64_t before;
    MOE_TK_PTX("atom.acq_rel", ".exch.b64 %0, [%1], %2;", : "=l"(before) : "l"(at), "l"(value));
    return before;
}

template <scope S>
MOE_TK_DEVICE_FN void red_release(uint32_t *at, uint32_t value) {
    MOE_TK_PTX("red.release", ".add.u32 [%0], %1;", ::"l"(at), "r"(value));
}

template <scope S>
MOE_TK_DEVICE_FN void red_release(uint64_t *at, uint64_t value) {
    MOE_TK_PTX("red.release", ".add.u64 [%0], %1;", ::"l"(at), "l"(value));
}

template <scope S>
MOE_TK_DEVICE_FN void fence() {
    MOE_TK_PTX("fence.acq_rel", ";", ::);
}

MOE_TK_DEVICE_FN void fence_proxy_async() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900  // the first with TMA; before it there is no async proxy
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

MOE_TK_DEVICE_FN void nap_ns(uint32_t duration_ns) { asm volatile("nanosleep.u32 %0;" ::"r"(duration_ns) : "memory"); }

// Wall clock, the same rate whatever the SM clock does; ticks every 32 ns on H200, about every microsecond elsewhere.
MOE_TK_DEVICE_FN uint64_t now_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}
// Cycles of this multiprocessor.
MOE_TK_DEVICE_FN uint32_t clock_cycles() {
    uint32_t clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
    return clock;
}
// Dynamic shared memory of the launch.
MOE_TK_DEVICE_FN uint32_t dynamic_shared_bytes() {
    uint32_t bytes;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes)::"memory");
    return bytes;
}

// Neighbouring lanes move neighbouring words: 16 bytes each where addresses and length allow it, else 4, else 1.
template <class Word>
MOE_TK_DEVICE_FN void copy_words(void *to, const void *from, int64_t bytes, int lane, int lanes) {
    Word *target = static_cast<Word *>(to);
    const Word *source = static_cast<const Word *>(from);
    for (int64_t i = lane; i < bytes / int64_t(sizeof(Word)); i += lanes) target[i] = source[i];
}

MOE_TK_DEVICE_FN void copy_bytes(void *to, const void *from, int64_t bytes, int lane, int lanes) {
    const uint64_t all = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | uint64_t(bytes);
    if (all % 16 == 0) return copy_words<uint4>(to, from, bytes, lane, lanes);
    if (all % 4 == 0) return copy_words<uint32_t>(to, from, bytes, lane, lanes);
    copy_words<unsigned char>(to, from, bytes, lane, lanes);
}

#undef MOE_TK_PTX
#undef MOE_TK_DEVICE_FN

}  // namespace moe_tk::platform::device_side
