// Shared tiles. A tile of COLS columns is stored as panels of one swizzle width each (at most 128 bytes): panel 0 holds the
// first columns of all rows, then panel 1, ... Inside a panel the 16-byte chunks of a row are permuted by the row number,
// exactly as TMA and wgmma do for the same swizzle mode; a tile must start at a multiple of 1024 bytes.
#pragma once

#include "../common/base.cuh"

namespace kittens {

// Bytes of one panel row: the widest of 128, 64, 32 that divides the row.
__host__ __device__ constexpr int panel_bytes(int row_bytes) {
    return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
}

// Byte offset inside a panel with `width`-byte rows: 16-byte chunk index xor (row modulo width/16), repeated every 8 rows
// of 128 bytes (128B), every 8 rows of 64 (64B) or of 32 (32B): address bits [4,7) ^= bits [7,10), masked to the width.
__host__ __device__ constexpr uint32_t swizzle_offset(uint32_t linear, int width) {
    const uint32_t mask = width == 128 ? 0x70 : width == 64 ? 0x30 : 0x10;
    return linear ^ ((linear >> 3) & mask);
}

template <class T_, int ROWS, int COLS> struct st {
    using dtype = T_;
    static constexpr int rows = ROWS, cols = COLS;
    static constexpr int row_bytes = COLS * int(sizeof(T_));
    static constexpr int swizzle_bytes = panel_bytes(row_bytes);
    static constexpr int panel_cols = swizzle_bytes / int(sizeof(T_));
    static constexpr int num_panels = COLS / panel_cols;
    static constexpr int num_elements = ROWS * COLS;
    static constexpr int num_bytes = ROWS * row_bytes;
    static_assert(row_bytes % 32 == 0, "a shared tile row must be a multiple of 32 bytes");
    static_assert(ROWS % 8 == 0, "a shared tile has a multiple of 8 rows: the swizzle repeats every 8");

    alignas(num_bytes % 1024 == 0 ? 1024 : 128) T_ data[ROWS * COLS];

    // Byte offset of element (row, col) from the start of the tile.
    __host__ __device__ static constexpr uint32_t offset(int row, int col) {
        const int panel = col / panel_cols, in_panel = col % panel_cols;
        const uint32_t linear = uint32_t(row) * swizzle_bytes + uint32_t(in_panel) * sizeof(T_);
        return uint32_t(panel) * ROWS * swizzle_bytes + swizzle_offset(linear, swizzle_bytes);
    }
    __device__ uint32_t address(int row, int col) const { return shared_address(data) + offset(row, col); }
    __device__ T_ &operator[](int2 rc) {
        return *reinterpret_cast<T_ *>(reinterpret_cast<uint8_t *>(data) + offset(rc.x, rc.y));
    }

    // Rows [index * R, (index + 1) * R) as a tile of their own: they are contiguous while there is one panel.
    template <int R> __device__ st<T_, R, COLS> &row_slab(int index) {
        static_assert(num_panels == 1 && ROWS % R == 0 && R * swizzle_bytes % 1024 == 0,
                      "a slab needs one panel and whole 1024-byte swizzle atoms");
        return *reinterpret_cast<st<T_, R, COLS> *>(reinterpret_cast<uint8_t *>(data) + index * R * swizzle_bytes);
    }
};

template <int R, int C> using st_bf = st<bf16, R, C>;
template <int R, int C> using st_fp8e4m3 = st<fp8e4m3, R, C>;
template <int R, int C> using st_fl = st<float, R, C>;

// Shared vectors: plain contiguous storage, 16-byte multiples so that bulk copies can move them.
template <class T_, int LENGTH> struct sv {
    using dtype = T_;
    static constexpr int length = LENGTH;
    static constexpr int num_bytes = LENGTH * int(sizeof(T_));
    static_assert(num_bytes % 16 == 0, "a shared vector must be a multiple of 16 bytes");
    alignas(128) T_ data[LENGTH];
    __device__ T_ &operator[](int i) { return data[i]; }
    __device__ const T_ &operator[](int i) const { return data[i]; }
};

template <int L> using sv_bf = sv<bf16, L>;
template <int L> using sv_fl = sv<float, L>;

}  // namespace kittens
