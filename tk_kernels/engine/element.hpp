// Element types of the host engine and their conversion to and from float.
#pragma once

#include <cstdint>
#include <cstring>

namespace moe_tk::engine {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    const uint32_t wide = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) { return value; }

// Round to nearest, ties to even; NaN stays NaN (the plain carry could turn it into an infinity).
template <>
inline bf16 from_float<bf16>(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    if ((wide & 0x7fff'ffffu) > 0x7f80'0000u) return bf16{uint16_t((wide >> 16) | 0x40u)};
    return bf16{uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}

}  // namespace moe_tk::engine
