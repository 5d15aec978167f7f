// Register tiles of one warp, row layout. The base tile is 16 x 16: the fragment layout of mma.sync and of one warp of
// wgmma. Lane l holds, for the rows r = l / 4 and r + 8, the columns c = 2 * (l % 4) and c + 1, and the same 8 further on:
//   data[0] = (r, c..c+1)   data[1] = (r + 8, c..c+1)   data[2] = (r, c+8..c+9)   data[3] = (r + 8, c+8..c+9)
#pragma once

#include "../common/base.cuh"

namespace kittens {

template <class T> struct packed;
template <> struct packed<float> { using type = float2; };
template <> struct packed<bf16> { using type = bf16_2; };
template <> struct packed<fp8e4m3> { using type = fp8e4m3_4; };

// e4m3 base tiles have twice the columns: data[0] = (r, 4q..4q+3), data[1] = (r + 8, same), data[2], data[3] = 16 columns
// further on, for lane l = 4 r + q. In bytes that is the layout of bf16.
template <class T_> struct rt_base {
    using dtype = typename packed<T_>::type;
    static constexpr int rows = TILE_DIM, cols = sizeof(T_) == 1 ? 2 * TILE_DIM : TILE_DIM;
    dtype data[4];
};

template <class T_, int ROWS, int COLS> struct rt {
    using T = T_;
    using dtype = typename packed<T_>::type;
    static constexpr int rows = ROWS, cols = COLS;
    static constexpr int height = ROWS / rt_base<T_>::rows, width = COLS / rt_base<T_>::cols;
    static_assert(ROWS % rt_base<T_>::rows == 0 && COLS % rt_base<T_>::cols == 0, "register tiles are whole base tiles");
    rt_base<T_> tiles[height][width];
};

template <int R, int C> using rt_fl = rt<float, R, C>;
template <int R, int C> using rt_bf = rt<bf16, R, C>;
template <int R, int C> using rt_fp8e4m3 = rt<fp8e4m3, R, C>;

// Row and column of element `half` (0 or 1) of data[k] of a base tile, for a lane.
__host__ __device__ constexpr int rt_row(int lane, int k) { return lane / 4 + 8 * (k % 2); }
__host__ __device__ constexpr int rt_col(int lane, int k, int half) { return 2 * (lane % 4) + 8 * (k / 2) + half; }

// One value per row of a register tile: [i][0] for row 16 * i + l / 4, [i][1] for that + 8; equal in the 4 lanes of a row.
template <class T_, int ROWS> struct col_vec {
    static constexpr int length = ROWS, outer = ROWS / TILE_DIM;
    T_ data[outer][2];
};
// One value per column: [j][h][e] for column 16 * j + 8 * h + 2 * (l % 4) + e; equal in the 8 lanes of a column.
template <class T_, int COLS> struct row_vec {
    static constexpr int length = COLS, outer = COLS / TILE_DIM;
    T_ data[outer][2][2];
};

}  // namespace kittens
