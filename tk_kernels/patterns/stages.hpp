// The two GEMMs of a layer as stages: which rows, weights, gate, epilogue and push belong together.
#pragma once

#include "persistent.hpp"

namespace moe_tk::patterns {

template <class T, class Epilogue>
using gather_stage = roles::gemm_stage<T, hooks::counter_gate, Epilogue, hooks::count_push>;

template <class T, class Gate>
using scatter_stage = roles::gemm_stage<T, Gate, hooks::store_epilogue<T>, hooks::count_push>;

template <class T>
gather_stage<T, hooks::swiglu_epilogue<T>> gated_linear1(const launch_globals &g) {
    return {.phase = protocol::phase_id::gemm1,
            .rows = static_cast<const T *>(g.gathered),
            .depth = g.hidden,
            .weights = static_cast<const T *>(g.w13),
            .columns = g.intermediate,
            .gate = {g.counters.arrived, g.counters.arrived_want},
            .epilogue = {static_cast<T *>(g.activated), g.intermediate, g.activation,
                         g.weights_before_l2 ? g.pair_weights : nullptr, g.schedule.slot_pair},
            .push = {g.counters.l1_done}};
}

template <class T>
gather_stage<T, hooks::store_epilogue<T>> plain_linear1(const launch_globals &g) {
    return {.phase = protocol::phase_id::gemm1,
            .rows = static_cast<const T *>(g.gathered),
            .depth = g.hidden,
            .weights = static_cast<const T *>(g.w13),
            .columns = g.intermediate,
            .gate = {g.counters.arrived, g.counters.arrived_want},
            .epilogue = {static_cast<T *>(g.activated), g.intermediate},
            .push = {g.counters.l1_done}};
}

template <class T, class Gate>
scatter_stage<T, Gate> linear2(const launch_globals &g, typename Gate::params gate) {
    return {.phase = protocol::phase_id::gemm2,
            .rows = static_cast<const T *>(g.activated),
            .depth = g.intermediate,
            .weights = static_cast<const T *>(g.w2),
            .columns = g.out_width,
            .gate = gate,
            .epilogue = {static_cast<T *>(g.expert_out), g.out_width},
            .push = {g.counters.l2_done}};
}

}  // namespace moe_tk::patterns
