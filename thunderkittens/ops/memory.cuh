// Register tiles to and from shared tiles.
#pragma once

#include "../types/rt.cuh"
#include "../types/st.cuh"
#include "sync.cuh"

namespace kittens {

namespace detail {

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const bf16_2 (&v)[4]) {
    const uint32_t *r = reinterpret_cast<const uint32_t *>(v);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, bf16_2 (&v)[4]) {
    uint32_t *r = reinterpret_cast<uint32_t *>(v);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// Address that this lane gives to ld/stmatrix.x4 for the 16 x 16 base tile at (row, col): matrices 0-3 are data[0..3],
// that is rows 0-7 and 8-15 of the left half, then of the right half; lane l addresses row l % 8 of matrix l / 8.
template <class ST> __device__ __forceinline__ uint32_t matrix_address(const ST &tile, int row, int col) {
    const int lane = laneid();
    return tile.address(row + lane % 16, col + 8 * (lane / 16));
}

}  // namespace detail

// GROUP_WARPS warps share a tile by rows: warp w of the group owns rows [w * R, (w + 1) * R).
template <int GROUP_WARPS> struct group_memory {
    static __device__ __forceinline__ int warp_in_group() { return warpid() % GROUP_WARPS; }

    // bf16 registers to a bf16 shared tile, columns [col, col + C).
    template <int R, int C, int SR, int SC>
    static __device__ __forceinline__ void store(st<bf16, SR, SC> &dst, const rt_bf<R, C> &src, int col = 0) {
        static_assert(SR == R * GROUP_WARPS, "the shared tile has the rows of all warps of the group");
        const int row0 = warp_in_group() * R;
#pragma unroll
        for (int i = 0; i < R / 16; ++i)
#pragma unroll
            for (int j = 0; j < C / 16; ++j)
                detail::stmatrix_x4(detail::matrix_address(dst, row0 + 16 * i, col + 16 * j), src.tiles[i][j].data);
    }
    template <int R, int C, int SR, int SC>
    static __device__ __forceinline__ void load(rt_bf<R, C> &dst, const st<bf16, SR, SC> &src, int col = 0) {
        static_assert(SR == R * GROUP_WARPS, "the shared tile has the rows of all warps of the group");
        const int row0 = warp_in_group() * R;
#pragma unroll
        for (int i = 0; i < R / 16; ++i)
#pragma unroll
            for (int j = 0; j < C / 16; ++j)
                detail::ldmatrix_x4(detail::matrix_address(src, row0 + 16 * i, col + 16 * j), dst.tiles[i][j].data);
    }
};

}  // namespace kittens
