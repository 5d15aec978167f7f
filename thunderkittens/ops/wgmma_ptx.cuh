// wgmma: one asm wrapper per shape and type. D (64 x N, fp32, in registers) += A (64 x K) * B (N x K)^T, A and B in shared
// memory, both K-major, described by 64-bit descriptors. SM90a only.
#pragma once

#include "../types/rt.cuh"
#include "../types/st.cuh"

namespace kittens::detail {

// Descriptor of a K-major operand in one panel: start address, the stride between groups of 8 rows, the swizzle mode.
template <int SWIZZLE> __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
    constexpr uint64_t MODE = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : 3;
    constexpr uint64_t GROUP_STRIDE = 8 * SWIZZLE;
    return uint64_t((address & 0x3ffff) >> 4) | (uint64_t(1) << 16) | ((GROUP_STRIDE >> 4) << 32) | (MODE << 62);
}

template <class T, int N> struct wgmma;  // static void mma(D, descriptor of A, descriptor of B, accumulate)

#define KITTENS_R8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define KITTENS_REGS_8 KITTENS_R8(0, 1, 2, 3, 4, 5, 6, 7)
#define KITTENS_REGS_16 KITTENS_REGS_8 "," KITTENS_R8(8, 9, 10, 11, 12, 13, 14, 15)
#define KITTENS_REGS_32                                             \
    KITTENS_REGS_16 "," KITTENS_R8(16, 17, 18, 19, 20, 21, 22, 23) \
        "," KITTENS_R8(24, 25, 26, 27, 28, 29, 30, 31)
#define KITTENS_REGS_48                                             \
    KITTENS_REGS_32 "," KITTENS_R8(32, 33, 34, 35, 36, 37, 38, 39) \
        "," KITTENS_R8(40, 41, 42, 43, 44, 45, 46, 47)
#define KITTENS_REGS_64                                             \
    KITTENS_REGS_48 "," KITTENS_R8(48, 49, 50, 51, 52, 53, 54, 55) \
        "," KITTENS_R8(56, 57, 58, 59, 60, 61, 62, 63)
#define KITTENS_REGS_96                                                                                            \
    KITTENS_REGS_64 "," KITTENS_R8(64, 65, 66, 67, 68, 69, 70, 71) "," KITTENS_R8(72, 73, 74, 75, 76, 77, 78, 79) \
        "," KITTENS_R8(80, 81, 82, 83, 84, 85, 86, 87) "," KITTENS_R8(88, 89, 90, 91, 92, 93, 94, 95)
#define KITTENS_REGS_128                                                                        \
    KITTENS_REGS_96 "," KITTENS_R8(96, 97, 98, 99, 100, 101, 102, 103)                         \
        "," KITTENS_R8(104, 105, 106, 107, 108, 109, 110, 111)                                 \
        "," KITTENS_R8(112, 113, 114, 115, 116, 117, 118, 119) "," KITTENS_R8(120, 121, 122, 123, 124, 125, 126, 127)

// The 8 accumulators of 16 columns, in the order of the instruction.
#define KITTENS_D16(t)                                                                                   \
    "+f"(d.tiles[0][t].data[0].x), "+f"(d.tiles[0][t].data[0].y), "+f"(d.tiles[0][t].data[1].x),        \
        "+f"(d.tiles[0][t].data[1].y), "+f"(d.tiles[0][t].data[2].x), "+f"(d.tiles[0][t].data[2].y),    \
        "+f"(d.tiles[0][t].data[3].x), "+f"(d.tiles[0][t].data[3].y)
#define KITTENS_OPS_8 KITTENS_D16(0)
#define KITTENS_OPS_16 KITTENS_D16(0), KITTENS_D16(1)
#define KITTENS_OPS_32 KITTENS_OPS_16, KITTENS_D16(2), KITTENS_D16(3)
#define KITTENS_OPS_48 KITTENS_OPS_32, KITTENS_D16(4), KITTENS_D16(5)
#define KITTENS_OPS_64 KITTENS_OPS_48, KITTENS_D16(6), KITTENS_D16(7)
#define KITTENS_OPS_96 KITTENS_OPS_64, KITTENS_D16(8), KITTENS_D16(9), KITTENS_D16(10), KITTENS_D16(11)
#define KITTENS_OPS_128 KITTENS_OPS_96, KITTENS_D16(12), KITTENS_D16(13), KITTENS_D16(14), KITTENS_D16(15)

// REGS = N / 2 accumulators; DA, DB, P are the operand numbers that follow them.
#define KITTENS_WGMMA(TYPE, N, REGS, DA, DB, P, K, NAME, TAIL)                                                         \
    template <> struct wgmma<TYPE, N> {                                                                                \
        static __device__ __forceinline__ void mma(rt_fl<16, N> &d, uint64_t a, uint64_t b, int accumulate) {          \
            asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k" #K    \
                         ".f32." NAME "." NAME " {" KITTENS_REGS_##REGS "}, %" #DA ", %" #DB ", p, " TAIL "; }"         \
                         : KITTENS_OPS_##REGS                                                                          \
                         : "l"(a), "l"(b), "r"(accumulate)                                                             \
                         : "memory");                                                                                  \
        }                                                                                                              \
    };
// bf16 takes two more immediates than e4m3: whether A and B are transposed (they are not).
#define KITTENS_WGMMA_BOTH(N, REGS, DA, DB, P)                                  \
    KITTENS_WGMMA(bf16, N, REGS, DA, DB, P, 16, "bf16", "1, 1, 0, 0")           \
    KITTENS_WGMMA(fp8e4m3, N, REGS, DA, DB, P, 32, "e4m3", "1, 1")

KITTENS_WGMMA_BOTH(16, 8, 8, 9, 10)
KITTENS_WGMMA_BOTH(32, 16, 16, 17, 18)
KITTENS_WGMMA_BOTH(64, 32, 32, 33, 34)
KITTENS_WGMMA_BOTH(96, 48, 48, 49, 50)
KITTENS_WGMMA_BOTH(128, 64, 64, 65, 66)
KITTENS_WGMMA_BOTH(192, 96, 96, 97, 98)
KITTENS_WGMMA_BOTH(256, 128, 128, 129, 130)

#undef KITTENS_WGMMA_BOTH
#undef KITTENS_WGMMA

}  // namespace kittens::detail
