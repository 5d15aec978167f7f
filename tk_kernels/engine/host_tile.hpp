// The host engine: one output tile in float32, acc = A (rows x K) * W^T, on one thread. Sums run over K in a fixed
// order that depends on neither the thread nor the tile's neighbours, so results are bitwise equal from run to run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "element.hpp"

namespace moe_tk::engine {

constexpr int PANEL = 16;     // weight rows that are multiplied at a time
constexpr int K_BLOCK = 256;  // depth of a packed panel: PANEL * K_BLOCK * 4 bytes stay in the first-level cache
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 8;
#else
constexpr int ROWS_AT_ONCE = 4;
#endif

typedef float lanes __attribute__((vector_size(PANEL * sizeof(float))));

// Scratch of one thread, kept over the tiles of a launch.
struct tile_scratch {
    std::vector<float> rows;   // [rows, K] the A block in float
    alignas(64) float panel[K_BLOCK * PANEL];
    std::vector<float> acc;    // [rows, columns]
};

// Packs PANEL weight rows (those at or past `count` as zeros), columns k0..k0+depth, transposed: panel[k][row].
template <class T>
inline void pack_panel(const T *weight, int64_t stride, int count, int64_t k0, int depth, float *panel) {
    for (int row = 0; row < PANEL; ++row) {
        if (row >= count) {
            for (int k = 0; k < depth; ++k) panel[k * PANEL + row] = 0.0f;
            continue;
        }
        const T *from = weight + row * stride + k0;
        for (int k = 0; k < depth; ++k) panel[k * PANEL + row] = to_float(from[k]);
    }
}

template <int ROWS>
inline void multiply_panel(const float *a, int64_t a_stride, const float *panel, int depth, float *acc, int64_t acc_stride) {
    lanes sum[ROWS];
    for (int r = 0; r < ROWS; ++r) __builtin_memcpy(&sum[r], acc + r * acc_stride, sizeof(lanes));
    for (int k = 0; k < depth; ++k) {
        lanes weight;
        __builtin_memcpy(&weight, panel + k * PANEL, sizeof(lanes));
        for (int r = 0; r < ROWS; ++r) sum[r] += a[r * a_stride + k] * weight;
    }
    for (int r = 0; r < ROWS; ++r) __builtin_memcpy(acc + r * acc_stride, &sum[r], sizeof(lanes));
}

// The A block of a tile, converted once for all weight panels.
template <class T>
inline void load_rows(const T *a, int64_t a_stride, int rows, int64_t depth, tile_scratch &scratch) {
    scratch.rows.resize(size_t(rows) * size_t(depth));
    for (int r = 0; r < rows; ++r) {
        const T *from = a + r * a_stride;
        float *to = scratch.rows.data() + r * depth;
        for (int64_t k = 0; k < depth; ++k) to[k] = to_float(from[k]);
    }
}

// acc[rows, acc_column .. acc_column + columns) = A * weight[0..columns)^T; acc rows are acc_stride apart and must have room
// for whole panels.
template <class T>
inline void multiply(const T *weight, int64_t weight_stride, int columns, int rows, int64_t depth, tile_scratch &scratch,
                     float *acc, int64_t acc_stride) {
    for (int column = 0; column < columns; column += PANEL) {
        const int count = std::min(PANEL, columns - column);
        for (int r = 0; r < rows; ++r) std::fill_n(acc + r * acc_stride + column, PANEL, 0.0f);
        for (int64_t k0 = 0; k0 < depth; k0 += K_BLOCK) {
            const int block = int(std::min<int64_t>(K_BLOCK, depth - k0));
            pack_panel(weight + column * weight_stride, weight_stride, count, k0, block, scratch.panel);
            const float *a = scratch.rows.data() + k0;
            int r = 0;
            for (; r + ROWS_AT_ONCE <= rows; r += ROWS_AT_ONCE) {
                multiply_panel<ROWS_AT_ONCE>(a + r * depth, depth, scratch.panel, block, acc + r * acc_stride + column, acc_stride);
            }
            for (; r < rows; ++r) {
                multiply_panel<1>(a + r * depth, depth, scratch.panel, block, acc + r * acc_stride + column, acc_stride);
            }
        }
    }
}

}  // namespace moe_tk::engine
