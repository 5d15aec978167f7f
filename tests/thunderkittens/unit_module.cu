// One kernel for each operation of the tile library; the Python side holds the oracles. Pointers are integers.
#include <pybind11/pybind11.h>

#include "thunderkittens/kittens.cuh"

namespace py = pybind11;
using namespace kittens;

namespace {

template <class T> T *ptr(uint64_t address) { return reinterpret_cast<T *>(static_cast<uintptr_t>(address)); }
void check(cudaError_t err) {
    if (err != cudaSuccess) throw std::runtime_error(cudaGetErrorString(err));
}
template <class K, class... Args> void run(K kernel, int threads, int smem, const Args &...args) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    kernel<<<1, threads, smem>>>(args...);
    check(cudaGetLastError());
    check(cudaDeviceSynchronize());
}

// ---- layout facts, at compile time ------------------------------------------------------------------------------------
static_assert(st_bf<64, 64>::swizzle_bytes == 128 && st_bf<64, 32>::swizzle_bytes == 64 && st_bf<64, 16>::swizzle_bytes == 32);
static_assert(st_bf<64, 128>::num_panels == 2 && st_fp8e4m3<64, 128>::num_panels == 1);
static_assert(st_bf<64, 64>::offset(0, 8) == 16 && st_bf<64, 64>::offset(1, 0) == 128 + 16 && st_bf<64, 64>::offset(7, 0) == 7 * 128 + 112);
static_assert(st_bf<64, 64>::offset(8, 0) == 1024 && st_bf<64, 128>::offset(0, 64) == 64 * 128);
static_assert(st_bf<64, 32>::offset(2, 0) == 128 + 16 && st_bf<64, 16>::offset(4, 0) == 128 + 16);
static_assert(sizeof(st_bf<64, 64>) == 8192 && sizeof(sv_fl<32>) == 128);
static_assert(rt_row(5, 1) == 9 && rt_col(5, 2, 1) == 11);

// ---- TMA: a tile in, the tile out again; the generic view of shared memory in between -------------------------------------
template <class T, class ST> struct copy_globals {
    gl<T, 1, 1, -1, -1, ST> in, out;
    T *seen;  // the tile as operator[] reads it
    int row, col;
};
template <class T, class ST> __global__ void tma_copy(const __grid_constant__ copy_globals<T, ST> g) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ semaphore arrived;
    ST &tile = *reinterpret_cast<ST *>(memory);
    if (threadIdx.x == 0) {
        init_semaphore(arrived, 1);
        fence_semaphore_init();
        tma::expect_bytes(arrived, ST::num_bytes);
        tma::load_async(tile, g.in, coord<>(g.row, g.col), arrived);
    }
    __syncthreads();
    wait(arrived, 0);
    for (int i = threadIdx.x; i < ST::num_elements; i += blockDim.x)
        g.seen[i] = tile[int2{i / ST::cols, i % ST::cols}];
    __syncthreads();
    if (threadIdx.x == 0) {
        tma::store_async(g.out, tile, coord<>(g.row, g.col));
        tma::store_commit_group();
        tma::store_async_wait();
    }
}
template <class T, int R, int C> void run_tma(uint64_t in, uint64_t out, uint64_t seen, int rows, int cols, int row, int col) {
    using ST = st<T, R, C>;
    const copy_globals<T, ST> g{{ptr<T>(in), 1, 1, rows, cols}, {ptr<T>(out), 1, 1, rows, cols}, ptr<T>(seen), row, col};
    run(tma_copy<T, ST>, 128, int(sizeof(ST)), g);
}

// ---- bulk vectors, two phases of one semaphore --------------------------------------------------------------------------
__global__ void bulk_copy(const float *in, float *out, int rounds) {
    __shared__ sv_fl<64> v;
    __shared__ semaphore arrived;
    if (threadIdx.x != 0) return;
    init_semaphore(arrived, 1);
    fence_semaphore_init();
    for (int i = 0; i < rounds; ++i) {
        tma::expect_bytes(arrived, sv_fl<64>::num_bytes);
        tma::load_async(v, in + 64 * i, arrived);
        wait(arrived, i % 2);
        tma::store_async(out + 64 * i, v);
        tma::store_commit_group();
        tma::store_async_wait();
    }
}

// ---- registers <-> shared memory, by a warp and by a warpgroup ------------------------------------------------------------
template <class T, int WARPS> __global__ void through_registers(const __grid_constant__ copy_globals<T, st<T, 16 * WARPS, 128 / sizeof(T)>> g) {
    using ST = st<T, 16 * WARPS, 128 / sizeof(T)>;
    extern __shared__ __align__(1024) uint8_t memory[];
    ST &a = *reinterpret_cast<ST *>(memory), &b = *reinterpret_cast<ST *>(memory + sizeof(ST));
    for (int i = threadIdx.x; i < ST::num_elements; i += blockDim.x)
        a[int2{i / ST::cols, i % ST::cols}] = *g.in.at(coord<>(i / ST::cols, i % ST::cols));
    __syncthreads();
    rt<T, 16, ST::cols> reg;
    group<WARPS>::load(reg, a);
    group<WARPS>::store(b, reg);
    __syncthreads();
    for (int i = threadIdx.x; i < ST::num_elements; i += blockDim.x) g.seen[i] = b[int2{i / ST::cols, i % ST::cols}];
}
template <class T, int WARPS> void run_registers(uint64_t in, uint64_t seen) {
    using ST = st<T, 16 * WARPS, 128 / sizeof(T)>;
    const copy_globals<T, ST> g{{ptr<T>(in), 1, 1, ST::rows, ST::cols}, {ptr<T>(in), 1, 1, ST::rows, ST::cols}, ptr<T>(seen), 0, 0};
    run(through_registers<T, WARPS>, 32 * WARPS, 2 * int(sizeof(ST)), g);
}

// ---- mma.sync and row operations: one warp ---------------------------------------------------------------------------------
template <int R, int C> __device__ void write_out(float *out, const rt_fl<R, C> &d, int row0 = 0) {
    for (int i = 0; i < d.height; ++i)
        for (int j = 0; j < d.width; ++j)
            for (int k = 0; k < 4; ++k) {
                float *at = out + (row0 + 16 * i + rt_row(laneid(), k)) * C + 16 * j + rt_col(laneid(), k, 0);
                at[0] = d.tiles[i][j].data[k].x, at[1] = d.tiles[i][j].data[k].y;
            }
}
template <class T> __global__ void warp_product(const T *a, const T *b, float *out) {
    constexpr int COLS = 128 / sizeof(T);
    extern __shared__ __align__(1024) uint8_t memory[];
    using ST = st<T, 32, COLS>;
    ST &sa = *reinterpret_cast<ST *>(memory), &sb = *reinterpret_cast<ST *>(memory + sizeof(ST));
    for (int i = threadIdx.x; i < ST::num_elements; i += 32) {
        sa[int2{i / COLS, i % COLS}] = a[i];
        sb[int2{i / COLS, i % COLS}] = b[i];
    }
    __syncwarp();
    rt<T, 32, COLS> ra, rb;
    warp::load(ra, sa);
    warp::load(rb, sb);
    rt_fl<32, 32> d;
    warp::zero(d);
    warp::mma_ABt(d, ra, rb);
    write_out(out, d);
}
__global__ void row_operations(const bf16 *in, float *scaled, float *sums, float *largest) {
    __shared__ st_bf<16, 64> tile;
    for (int i = threadIdx.x; i < 16 * 64; i += 32) tile[int2{i / 64, i % 64}] = in[i];
    __syncwarp();
    rt_bf<16, 64> x;
    rt_fl<16, 64> f;
    col_vec<float, 16> sum, top;
    warp::load(x, tile);
    warp::copy(f, x);
    warp::row_sum(sum, f);
    warp::row_max(top, f);
    warp::mul_row(f, top);
    warp::add(f, f);
    write_out(scaled, f);
    if (laneid() % 4 == 0)
        for (int h = 0; h < 2; ++h) sums[laneid() / 4 + 8 * h] = sum.data[0][h], largest[laneid() / 4 + 8 * h] = top.data[0][h];
}

// ---- a tile into two ranks' memory through a pgl ----------------------------------------------------------------------------
struct pgl_globals {
    using GL = gl<bf16, 1, 1, -1, -1, st_bf<64, 64>>;
    GL in;
    pgl<GL, 4> out;
};
__global__ void to_all_ranks(const __grid_constant__ pgl_globals g) {
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ semaphore arrived;
    auto &tile = *reinterpret_cast<st_bf<64, 64> *>(memory);
    if (threadIdx.x != 0) return;
    init_semaphore(arrived, 1);
    fence_semaphore_init();
    tma::expect_bytes(arrived, tile.num_bytes);
    tma::load_async(tile, g.in, coord<st_bf<64, 64>>(0, 0), arrived);
    wait(arrived, 0);
    for (int r = 0; r < g.out.num_ranks; ++r) tma::store_async(g.out[r], tile, coord<st_bf<64, 64>>(r, 0));
    tma::store_commit_group();
    tma::store_async_wait();
}

// ---- wgmma, named barriers: one warpgroup ---------------------------------------------------------------------------------
#ifdef KITTENS_TEST_WGMMA
template <class T, int N> __global__ void warpgroup_product(const T *a, const T *b, float *out) {
    constexpr int COLS = 128 / sizeof(T);
    extern __shared__ __align__(1024) uint8_t memory[];
    using A = st<T, 64, COLS>;
    using B = st<T, N, COLS>;
    A &sa = *reinterpret_cast<A *>(memory);
    B &sb = *reinterpret_cast<B *>(memory + sizeof(A));
    for (int i = threadIdx.x; i < A::num_elements; i += 128) sa[int2{i / COLS, i % COLS}] = a[i];
    for (int i = threadIdx.x; i < B::num_elements; i += 128) sb[int2{i / COLS, i % COLS}] = b[i];
    fence_proxy_async_shared();
    warpgroup::sync(1);
    rt_fl<16, N> d;
    warpgroup::mma_fence(d);
    warpgroup::mm_ABt(d, sa, sb);
    warpgroup::mma_ABt(d, sa, sb);
    warpgroup::mma_commit_group();
    warpgroup::mma_async_wait(d);
    write_out(out, d, 16 * warpgroup::warp_in_group());
}
template <class T, int N> void run_wgmma(uint64_t a, uint64_t b, uint64_t out) {
    run(warpgroup_product<T, N>, 128, (64 + N) * 128, ptr<const T>(a), ptr<const T>(b), ptr<float>(out));
}
template <class T> void wgmma_of(int n, uint64_t a, uint64_t b, uint64_t out) {
    switch (n) {
        case 16: return run_wgmma<T, 16>(a, b, out);
        case 32: return run_wgmma<T, 32>(a, b, out);
        case 64: return run_wgmma<T, 64>(a, b, out);
        case 96: return run_wgmma<T, 96>(a, b, out);
        case 128: return run_wgmma<T, 128>(a, b, out);
        case 192: return run_wgmma<T, 192>(a, b, out);
        case 256: return run_wgmma<T, 256>(a, b, out);
    }
    throw std::runtime_error("no such width");
}
#endif

}  // namespace

PYBIND11_MODULE(kittens_unit, m) {
    m.def("tma_128", &run_tma<bf16, 64, 128>);  // two panels of 128 bytes
    m.def("tma_64", &run_tma<bf16, 64, 32>);
    m.def("tma_32", &run_tma<bf16, 64, 16>);
    m.def("tma_e4m3", &run_tma<fp8e4m3, 64, 128>);
    m.def("bulk", [](uint64_t in, uint64_t out, int rounds) { run(bulk_copy, 32, 0, ptr<const float>(in), ptr<float>(out), rounds); });
    m.def("registers_warp_bf16", &run_registers<bf16, 1>);
    m.def("registers_warpgroup_bf16", &run_registers<bf16, 4>);
    m.def("registers_warp_e4m3", &run_registers<fp8e4m3, 1>);
    m.def("registers_warpgroup_e4m3", &run_registers<fp8e4m3, 4>);
    m.def("mma_bf16", [](uint64_t a, uint64_t b, uint64_t out) { run(warp_product<bf16>, 32, 8192, ptr<const bf16>(a), ptr<const bf16>(b), ptr<float>(out)); });
    m.def("mma_e4m3", [](uint64_t a, uint64_t b, uint64_t out) { run(warp_product<fp8e4m3>, 32, 8192, ptr<const fp8e4m3>(a), ptr<const fp8e4m3>(b), ptr<float>(out)); });
    m.def("rows", [](uint64_t in, uint64_t scaled, uint64_t sums, uint64_t largest) {
        run(row_operations, 32, 0, ptr<const bf16>(in), ptr<float>(scaled), ptr<float>(sums), ptr<float>(largest));
    });
    m.def("pgl", [](uint64_t in, uint64_t first, uint64_t second) {
        const pgl_globals g{{ptr<bf16>(in), 1, 1, 64, 64}, {{ptr<bf16>(first), ptr<bf16>(second)}, 1, 1, 128, 64}};
        run(to_all_ranks, 32, 8192, g);
    });
#ifdef KITTENS_TEST_WGMMA
    m.def("wgmma_bf16", &wgmma_of<bf16>);
    m.def("wgmma_e4m3", &wgmma_of<fp8e4m3>);
#endif
}
