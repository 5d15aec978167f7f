// Epilogues: what is done to a tile in the accumulator on its way to memory. WEIGHT_PANELS says how many bands of weight
// rows the tile needs (gate and up for SwiGLU); band p of the accumulator starts at column p * band_stride.
#pragma once

#include <algorithm>
#include <cmath>

#include "../engine/element.hpp"
#include "gates.hpp"

namespace moe_tk::hooks {

// Stores the tile as it is.
template <class T>
struct store_epilogue {
    static constexpr int WEIGHT_PANELS = 1;
    struct params { T *out; int64_t stride; };  // [rows, stride]
    static void store(const params &p, const tile_task &task, const float *acc, int64_t acc_stride, int64_t, int64_t column,
                      int columns, int64_t) {
        for (int r = 0; r < task.rows; ++r) {
            T *to = p.out + (task.first_row + r) * p.stride + column;
            for (int c = 0; c < columns; ++c) to[c] = engine::from_float<T>(acc[r * acc_stride + c]);
        }
    }
};

// g * sigmoid(alpha * g) * (u + beta), times the routing weight of the row if it is applied here.
template <class T>
struct swiglu_epilogue {
    static constexpr int WEIGHT_PANELS = 2;
    struct params {
        T *out;
        int64_t stride;
        patterns::activation_form form;
        const float *pair_weights;  // [pairs], null = leave the weight to the combine
        const int32_t *slot_pair;   // [slots]
    };

    static float activate(float gate, float up, const patterns::activation_form &form) {
        // Comparisons, not fmin: a NaN must stay a NaN in its own row.
        if (form.gate_limit > 0 && gate > form.gate_limit) gate = form.gate_limit;
        if (form.up_limit > 0) up = up > form.up_limit ? form.up_limit : up < -form.up_limit ? -form.up_limit : up;
        return gate / (1.0f + std::exp(-form.alpha * gate)) * (up + form.beta);
    }

    static void store(const params &p, const tile_task &task, const float *acc, int64_t acc_stride, int64_t band_stride,
                      int64_t column, int columns, int64_t first_slot) {
        for (int r = 0; r < task.rows; ++r) {
            const float weight = p.pair_weights ? p.pair_weights[p.slot_pair[first_slot + r]] : 1.0f;
            const float *gate = acc + r * acc_stride, *up = gate + band_stride;
            T *to = p.out + (task.first_row + r) * p.stride + column;
            for (int c = 0; c < columns; ++c) to[c] = engine::from_float<T>(activate(gate[c], up[c], p.form) * weight);
        }
    }
};

}  // namespace moe_tk::hooks
