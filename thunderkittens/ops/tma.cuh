// TMA: tensor tiles and bulk vectors between global and shared memory. Called by one thread. Loads complete on a semaphore
// (expect_bytes first); stores complete in bulk groups of the issuing thread.
#pragma once

#include "../common/base.cuh"
#include "../types/gl.cuh"
#include "../types/st.cuh"
#include "sync.cuh"

namespace kittens::tma {

// L2 eviction priority of a load, as the 64-bit policy that the instruction takes.
enum class cache_policy : uint64_t {
    NORMAL = 0x1000000000000000ull,
    EVICT_FIRST = 0x12f0000000000000ull,
    EVICT_LAST = 0x14f0000000000000ull,
};

// Announces bytes and arrives once.
__device__ __forceinline__ void expect_bytes(semaphore &sem, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&sem)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void prefetch_descriptor(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

namespace detail {

__device__ __forceinline__ void load_panel(uint32_t dst, const CUtensorMap *map, coord<> at, uint32_t sem,
                                           cache_policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
        "l"(map), "r"(sem), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b), "l"(static_cast<uint64_t>(policy))
        : "memory");
}

__device__ __forceinline__ void load_panel_multicast(uint32_t dst, const CUtensorMap *map, coord<> at, uint32_t sem,
                                                     uint16_t cta_mask, cache_policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(dst),
        "l"(map), "r"(sem), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b), "h"(cta_mask),
        "l"(static_cast<uint64_t>(policy))
        : "memory");
}

__device__ __forceinline__ void store_panel(const CUtensorMap *map, coord<> at, uint32_t src) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(src), "r"(at.c), "r"(at.r), "r"(at.d), "r"(at.b)
                 : "memory");
}

}  // namespace detail

// Rows and columns outside the tensor arrive as zeros and count as bytes all the same.
template <class ST, class GL, class Tile>
__device__ __forceinline__ void load_async(ST &dst, const GL &src, coord<Tile> idx, semaphore &sem,
                                           cache_policy policy = cache_policy::NORMAL) {
    coord<> at = idx.elements();
    const uint32_t base = shared_address(dst.data);
#pragma unroll
    for (int p = 0; p < ST::num_panels; ++p) {
        detail::load_panel(base + p * ST::rows * ST::swizzle_bytes, src.template map<ST>(), at, shared_address(&sem),
                           policy);
        at.c += ST::panel_cols;
    }
}

// Rows and columns outside the tensor are not written.
template <class GL, class ST, class Tile>
__device__ __forceinline__ void store_async(const GL &dst, const ST &src, coord<Tile> idx) {
    coord<> at = idx.elements();
    const uint32_t base = shared_address(src.data);
#pragma unroll
    for (int p = 0; p < ST::num_panels; ++p) {
        detail::store_panel(dst.template map<ST>(), at, base + p * ST::rows * ST::swizzle_bytes);
        at.c += ST::panel_cols;
    }
}

// Bulk copies of contiguous bytes: 16-byte aligned addresses, a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void load_bulk_async(T *dst_shared, const T *src, uint32_t bytes, semaphore &sem) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(dst_shared)),
                 "l"(src), "r"(bytes), "r"(shared_address(&sem))
                 : "memory");
}
template <class T> __device__ __forceinline__ void store_bulk_async(T *dst, const T *src_shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
                 "r"(shared_address(src_shared)), "r"(bytes)
                 : "memory");
}
template <class T, int L>
__device__ __forceinline__ void load_async(sv<T, L> &dst, const T *src, semaphore &sem) {
    load_bulk_async(dst.data, src, sv<T, L>::num_bytes, sem);
}
template <class T, int L> __device__ __forceinline__ void store_async(T *dst, const sv<T, L> &src) {
    store_bulk_async(dst, src.data, sv<T, L>::num_bytes);
}

__device__ __forceinline__ void store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the newest N groups are complete: their bytes are in the destination memory.
template <int N = 0> __device__ __forceinline__ void store_async_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// All but the newest N groups have read their shared source, which may be reused; says nothing about the destination.
template <int N = 0> __device__ __forceinline__ void store_async_read_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

namespace cluster {

// The same tile into every block of cta_mask, at the same shared address, completing on the semaphore at the same address
// there. Each of those blocks must expect the bytes itself.
template <class ST, class GL, class Tile>
__device__ __forceinline__ void load_async(ST &dst, const GL &src, coord<Tile> idx, semaphore &sem, uint16_t cta_mask,
                                           cache_policy policy = cache_policy::NORMAL) {
    coord<> at = idx.elements();
    const uint32_t base = shared_address(dst.data);
#pragma unroll
    for (int p = 0; p < ST::num_panels; ++p) {
        tma::detail::load_panel_multicast(base + p * ST::rows * ST::swizzle_bytes, src.template map<ST>(), at,
                                          shared_address(&sem), cta_mask, policy);
        at.c += ST::panel_cols;
    }
}

// Arrives on the semaphore at the same address in block `cta` of the cluster. Release at block scope only: it says that
// a buffer may be overwritten, it does not publish data (.cluster scope would cost a GPU-wide memory barrier each time).
__device__ __forceinline__ void arrive(semaphore &sem, int cta, uint32_t count = 1) {
    asm volatile(
        "{ .reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [remote], %2; }" ::"r"(shared_address(&sem)),
        "r"(cta), "r"(count)
        : "memory");
}

}  // namespace cluster
}  // namespace kittens::tma
