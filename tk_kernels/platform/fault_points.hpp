// Fault points: places at which a test makes this rank die, stop or lag. They exist only in a module that is built with
// MOE_TK_FAULT_POINTS; without it the macro is empty, so the translation unit is the same as if no point stood there.
#pragma once

#if defined(MOE_TK_FAULT_POINT)  // a test brings its own
#elif !defined(MOE_TK_FAULT_POINTS)
#define MOE_TK_FAULT_POINT(phase)
#else

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "platform.hpp"

namespace moe_tk::platform::fault_points {

enum class action : uint32_t { none, kill, stop, delay, lag };  // lag: delay at this point and at every later one

// One plan per process. The n-th point of `phase` that any thread of this process comes to acts, n from 1.
struct plan {
    std::atomic<uint32_t> action_id{0};
    uint32_t phase = 0;
    int64_t point = 0;
    uint64_t delay_ns = 0;
    uint64_t *stamp = nullptr;  // gets the time right before the action
    std::atomic<int64_t> passed{0};
};
inline plan armed;

// Not while a launch runs.
inline void arm(uint32_t action_id, uint32_t phase, int64_t point, uint64_t delay_ns, uint64_t *stamp) {
    armed.phase = phase;
    armed.point = point;
    armed.delay_ns = delay_ns;
    armed.stamp = stamp;
    armed.passed = 0;
    armed.action_id = action_id;
}

inline void reached(uint32_t phase) {
    const auto what = action(armed.action_id.load(std::memory_order_relaxed));
    if (what == action::none || phase != armed.phase) return;
    const int64_t number = armed.passed.fetch_add(1) + 1;
    if (number < armed.point || (number > armed.point && what != action::lag)) return;
    if (number == armed.point && armed.stamp) store_release<scope::system>(armed.stamp, now_ns());
    if (what == action::kill) kill(getpid(), SIGKILL);
    if (what == action::stop) kill(getpid(), SIGSTOP);
    for (const uint64_t end = now_ns() + armed.delay_ns; what >= action::delay && now_ns() < end;) nap_ns(1'000'000);
}

}  // namespace moe_tk::platform::fault_points

#define MOE_TK_FAULT_POINT(phase) ::moe_tk::platform::fault_points::reached(uint32_t(phase));
#endif
