// Register tiles to and from shared tiles.
#pragma once

#include "../types/rt.cuh"
#include "../types/st.cuh"
#include "sync.cuh"

namespace kittens {

namespace detail {

template <class Packed> __device__ __forceinline__ void stmatrix_x4(uint32_t address, const Packed (&v)[4]) {
    static_assert(sizeof(Packed) == 4);
    const uint32_t *r = reinterpret_cast<const uint32_t *>(v);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
template <class Packed> __device__ __forceinline__ void ldmatrix_x4(uint32_t address, Packed (&v)[4]) {
    static_assert(sizeof(Packed) == 4);
    uint32_t *r = reinterpret_cast<uint32_t *>(v);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// Address that this lane gives to ld/stmatrix.x4 for the base tile at (row, col), 16 rows of 32 bytes: matrices 0-3 are
// data[0..3], that is rows 0-7 and 8-15 of the left half, then of the right half; lane l addresses row l % 8 of matrix l / 8.
template <class ST> __device__ __forceinline__ uint32_t matrix_address(const ST &tile, int row, int col) {
    const int lane = laneid();
    return tile.address(row + lane % 16, col + 16 / int(sizeof(typename ST::dtype)) * (lane / 16));
}

}  // namespace detail

// GROUP_WARPS warps share a tile by rows: warp w of the group owns rows [w * R, (w + 1) * R).
template <int GROUP_WARPS> struct group_memory {
    static __device__ __forceinline__ int warp_in_group() { return warpid() % GROUP_WARPS; }

    // 2- or 1-byte registers to a shared tile of their type, columns [col, col + C).
    template <class T, int R, int C, int SR, int SC>
    static __device__ __forceinline__ void store(st<T, SR, SC> &dst, const rt<T, R, C> &src, int col = 0) {
        static_assert(SR == R * GROUP_WARPS, "the shared tile has the rows of all warps of the group");
        static_assert(sizeof(T) <= 2, "matrix stores move 1- and 2-byte elements");
        const int row0 = warp_in_group() * R;
#pragma unroll
        for (int i = 0; i < rt<T, R, C>::height; ++i)
#pragma unroll
            for (int j = 0; j < rt<T, R, C>::width; ++j)
                detail::stmatrix_x4(detail::matrix_address(dst, row0 + 16 * i, col + rt_base<T>::cols * j), src.tiles[i][j].data);
    }
    template <class T, int R, int C, int SR, int SC>
    static __device__ __forceinline__ void load(rt<T, R, C> &dst, const st<T, SR, SC> &src, int col = 0) {
        static_assert(SR == R * GROUP_WARPS, "the shared tile has the rows of all warps of the group");
        static_assert(sizeof(T) <= 2, "matrix loads move 1- and 2-byte elements");
        const int row0 = warp_in_group() * R;
#pragma unroll
        for (int i = 0; i < rt<T, R, C>::height; ++i)
#pragma unroll
            for (int j = 0; j < rt<T, R, C>::width; ++j)
                detail::ldmatrix_x4(detail::matrix_address(src, row0 + 16 * i, col + rt_base<T>::cols * j), dst.tiles[i][j].data);
    }
};

}  // namespace kittens
