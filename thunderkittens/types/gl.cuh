// Global layouts: a 4D tensor (batch, depth, rows, cols) in device memory, with TMA descriptors for the shared tile types
// that kernels move. Built on the host, passed inside a __grid_constant__ globals struct.
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "../common/base.cuh"
#include "st.cuh"

namespace kittens {

// Position in a global layout. coord<ST>{...}: rows and cols count tiles of ST; coord<>{...}: elements.
template <class Tile = void> struct coord {
    int b, d, r, c;
    __host__ __device__ coord(int b_, int d_, int r_, int c_) : b(b_), d(d_), r(r_), c(c_) {}
    __host__ __device__ coord(int r_, int c_) : b(0), d(0), r(r_), c(c_) {}
    __host__ __device__ coord<> elements() const {
        if constexpr (std::is_void_v<Tile>) return {b, d, r, c};
        else return {b, d, r * Tile::rows, c * Tile::cols};
    }
};

template <class T> struct tma_dtype;
template <> struct tma_dtype<bf16> { static constexpr auto value = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; };
template <> struct tma_dtype<fp8e4m3> { static constexpr auto value = CU_TENSOR_MAP_DATA_TYPE_UINT8; };
template <> struct tma_dtype<float> { static constexpr auto value = CU_TENSOR_MAP_DATA_TYPE_FLOAT32; };

namespace detail {

using encode_tiled_fn = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up at run time so that nothing links against libcuda.
inline encode_tiled_fn encode_tiled() {
    static const encode_tiled_fn fn = [] {
        void *symbol = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
        const cudaError_t err =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
        if (err != cudaSuccess || found != cudaDriverEntryPointSuccess || symbol == nullptr)
            throw std::runtime_error("kittens: the CUDA driver has no cuTensorMapEncodeTiled (12.0 or newer is needed): " +
                                     std::string(cudaGetErrorString(err)));
        return reinterpret_cast<encode_tiled_fn>(symbol);
    }();
    return fn;
}

struct tensor_extent {
    uint64_t cols, rows, depth, batch;      // elements
    uint64_t row_stride, depth_stride, batch_stride;  // bytes
};

// A descriptor that moves one panel (panel_cols x rows) of ST per instruction; out-of-bounds reads give zeros.
template <class ST> inline CUtensorMap make_tensor_map(const void *base, const tensor_extent &e) {
    if (reinterpret_cast<uintptr_t>(base) % 16 != 0 || e.row_stride % 16 != 0)
        throw std::runtime_error("kittens: TMA wants the base and the row stride in multiples of 16 bytes; stride is " +
                                 std::to_string(e.row_stride));
    static_assert(ST::rows <= 256, "a TMA box has at most 256 rows");
    const cuuint64_t dims[4] = {e.cols, e.rows, e.depth, e.batch};
    const cuuint64_t strides[3] = {e.row_stride, e.depth_stride, e.batch_stride};
    const cuuint32_t box[4] = {cuuint32_t(ST::panel_cols), cuuint32_t(ST::rows), 1, 1};
    const cuuint32_t step[4] = {1, 1, 1, 1};
    const auto swizzle = ST::swizzle_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                         : ST::swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
    CUtensorMap map{};
    const CUresult result = encode_tiled()(&map, tma_dtype<typename ST::dtype>::value, 4, const_cast<void *>(base), dims,
                                           strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("kittens: cuTensorMapEncodeTiled failed with CUresult " + std::to_string(int(result)) +
                                 " for (" + std::to_string(e.batch) + ", " + std::to_string(e.depth) + ", " +
                                 std::to_string(e.rows) + ", " + std::to_string(e.cols) + ")");
    return map;
}

template <class ST, class First, class... Rest> constexpr int index_of() {
    if constexpr (std::is_same_v<ST, First>) return 0;
    else {
        static_assert(sizeof...(Rest) > 0, "this global layout has no TMA descriptor for that tile type");
        return 1 + index_of<ST, Rest...>();
    }
}

template <int V> struct extent {  // V > 0: known to the compiler; -1: at run time
    __host__ __device__ constexpr extent(int) {}
    __host__ __device__ constexpr operator int() const { return V; }
};
template <> struct extent<-1> {
    int value;
    __host__ __device__ constexpr extent(int v) : value(v) {}
    __host__ __device__ constexpr operator int() const { return value; }
};

}  // namespace detail

template <class T_, int B, int D, int R, int C, class... TmaTiles> struct gl {
    using dtype = T_;
    T_ *raw_ptr;
    detail::extent<B> batch;
    detail::extent<D> depth;
    detail::extent<R> rows;
    detail::extent<C> cols;
    int64_t row_stride;  // elements between rows (>= cols); rows of a depth and depths of a batch are packed
    CUtensorMap tma_maps[sizeof...(TmaTiles) ? sizeof...(TmaTiles) : 1];

    gl(T_ *ptr, int b, int d, int r, int c, int64_t stride = 0)
        : raw_ptr(ptr), batch(b), depth(d), rows(r), cols(c), row_stride(stride ? stride : c) {
        const uint64_t row = uint64_t(row_stride) * sizeof(T_);
        const detail::tensor_extent e{uint64_t(c), uint64_t(r), uint64_t(d), uint64_t(b), row, row * r, row * r * d};
        int i = 0;
        // A tensor without elements has nothing to move: its maps stay zero and no kernel may use them.
        if (uint64_t(b) * d * r * c != 0) ((tma_maps[i++] = detail::make_tensor_map<TmaTiles>(ptr, e)), ...);
    }
    template <class ST> __device__ const CUtensorMap *map() const {
        return &tma_maps[detail::index_of<ST, TmaTiles...>()];
    }
    // Element address, 64-bit throughout.
    __host__ __device__ T_ *at(coord<> p) const {
        return raw_ptr + ((int64_t(p.b) * int(depth) + p.d) * int(rows) + p.r) * row_stride + p.c;
    }
};

}  // namespace kittens
