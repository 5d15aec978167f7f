// Launches of the dense operations: globals whose rows lie in several tensors, and the two templates over them.
#include <algorithm>

#include "dense.cuh"
#include "fused_launch.cuh"
#include "open_dense.cuh"
#include "push_rows.cuh"
#include "scatter_tiles.cuh"

namespace moe_tk::nvlink {

namespace {

template <class Base> struct dense_config : fused_config<Base> {
    static constexpr bool TILED_WEIGHTS = false;  // weights as they are given
};
using dense_128 = dense_config<gemm_config<bf16, 128, 256, 4, 2, 1, 2, 2>>;
using dense_64 = dense_config<gemm_config<bf16, 64, 256, 5, 1, 2, 1, 1>>;

struct tile_map {  // a descriptor for one tile type, of which a kernel holds several
    CUtensorMap tma;
    template <class> __device__ const CUtensorMap *map() const { return &tma; }
};
template <class Slab> tile_map map_of(const void *base, int parts, int64_t part_rows, int rows, int cols) {
    const uint64_t row = uint64_t(cols) * sizeof(bf16);
    tile_map map;
    map.tma = kittens::detail::make_tensor_map<Slab>(
        base, {uint64_t(cols), uint64_t(rows), uint64_t(parts), 1, row, row * part_rows, row * part_rows * parts});
    return map;
}

// AG+GEMM: own rows come from the caller's tensor, the others' from the planes that they are sent to.
template <class Cfg> struct dense_gather_globals : gather_globals<Cfg, plain_epilogue, push_mover> {
    tile_map own, gathered;
    int rank, blocks;
    __device__ const tile_map &tokens_of(const tile_task &t) const { return t.segment == rank ? own : gathered; }
    __device__ int row_of(const tile_task &t) const { return (t.row_block - t.segment * blocks) * Cfg::BLOCK_M; }
    __device__ coord<> tokens_at(const tile_task &t, int row, int k) const {
        return {0, t.segment == rank ? 0 : t.segment, row_of(t) + row, k};
    }
    __device__ coord<> out_at(const tile_task &t, int row, int col) const { return {0, t.segment, row_of(t) + row, col}; }
};

// GEMM+RS: each part's tiles go to the plane of this rank at the part's owner.
template <class Cfg> struct dense_scatter_globals : gemm_globals<Cfg, no_gate, plain_epilogue, owner_push> {
    tile_map owners[MAX_WORLD];
    int blocks;
    __device__ const tile_map &out_of(const tile_task &t) const { return owners[t.segment]; }
    __device__ int row_of(const tile_task &t) const { return (t.row_block - t.segment * blocks) * Cfg::BLOCK_M; }
    __device__ coord<> tokens_at(const tile_task &t, int row, int k) const { return {0, t.segment, row_of(t) + row, k}; }
    __device__ coord<> out_at(const tile_task &t, int row, int col) const { return {0, 0, row_of(t) + row, col}; }
};

// What both have in common.
template <class Cfg, class Gate, class Push>
gemm_globals<Cfg, Gate, plain_epilogue, Push> dense_globals(const dense_view &v, const dense_call &call, int x_parts, void *out,
                                                           int out_parts, typename Gate::params gate, typename Push::params push) {
    bf16 *x = static_cast<bf16 *>(const_cast<void *>(call.x)), *weight = static_cast<bf16 *>(const_cast<void *>(call.weight));
    return {.tokens = {x, 1, x_parts, call.num_tokens, call.k},
            .weights = {weight, 1, 1, call.n, call.k},
            .out = {static_cast<bf16 *>(out), 1, out_parts, out_parts ? call.num_tokens : 0, call.n},
            .scales = {},
            .tasks = {.tasks = v.tasks, .num_tasks_ptr = reinterpret_cast<const int *>(v.words + DENSE_TASKS), .num_tasks = 0,
                      .block_rows = v.block_rows},
            .gate = gate,
            .epilogue = {},
            .push = push,
            .tokens_policy = cache_policy::NORMAL,
            .weights_policy = cache_policy::NORMAL};
}

// Bytes that a warp sends between two fences, in whole rows.
constexpr int ITEM_BYTES = 32 * 1024;
int item_rows(int block_rows, int row_bytes) {
    int rows = block_rows;
    while (rows > 1 && rows * row_bytes > ITEM_BYTES) rows /= 2;
    return rows;
}

template <class Cfg> void launch_dense_gather(const dense_view &v, const dense_call &call, cudaStream_t stream) {
    using G = dense_gather_globals<Cfg>;
    const call_view &c = v.call;
    const int blocks = kittens::ceil_div(call.num_tokens, Cfg::BLOCK_M);
    G g{dense_globals<Cfg, pushed_gate, no_push>(v, call, 1, call.out, c.world, {c, blocks}, {}), {}, {}, c.rank, blocks};
    if (call.num_tokens > 0) {
        const void *planes = c.base[c.rank] + c.at.planes;
        g.own = map_of<typename G::a_slab>(call.x, 1, call.num_tokens, call.num_tokens, call.k);
        g.gathered = map_of<typename G::a_slab>(planes, c.world, c.max_tokens, call.num_tokens, call.k);
    }
    const push_mover::params push{.x = static_cast<const uint4 *>(call.x), .words = v.words, .sent = v.done,
                                  .next = v.words + DENSE_NEXT_PUSH, .num_tokens = call.num_tokens, .block_rows = Cfg::BLOCK_M,
                                  .blocks = blocks, .item_rows = item_rows(Cfg::BLOCK_M, call.k * int(sizeof(bf16)))};
    launch(gather_gemm<Cfg, plain_epilogue, push_mover, G>, v.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER,
           gather_shared_bytes<Cfg, push_mover>(), false, stream, g, push);
}

template <class Cfg> void launch_dense_scatter(const dense_view &v, const dense_call &call, cudaStream_t stream) {
    using G = dense_scatter_globals<Cfg>;
    const call_view &c = v.call;
    const int blocks = kittens::ceil_div(call.num_tokens, Cfg::BLOCK_M), col_blocks = kittens::ceil_div(call.n, Cfg::BLOCK_N);
    G g{dense_globals<Cfg, no_gate, owner_push>(v, call, c.world, nullptr, 0, {}, {c, v.done, blocks, col_blocks}), {}, blocks};
    for (int owner = 0; owner < c.world && call.num_tokens > 0; ++owner) {
        const void *plane = c.base[owner] + c.at.planes + int64_t(c.rank) * c.max_tokens * c.hidden * sizeof(bf16);
        g.owners[owner] = map_of<typename G::out_slab>(plane, 1, call.num_tokens, call.num_tokens, call.n);
    }
    const reduce_finish::params reduce{.words = v.words, .next = v.words + DENSE_NEXT_ROW, .out = static_cast<bf16 *>(call.out),
                                       .num_tokens = call.num_tokens, .block_rows = Cfg::BLOCK_M};
    launch(gemm_scatter<Cfg, reduce_finish, G>, v.num_sms, Cfg::NUM_THREADS, Cfg::CLUSTER, shared_bytes<Cfg, bf16>(), false, stream,
           g, c, reduce);
}

template <class Cfg> void prepare_variant() {
    check_cuda(cudaFuncSetAttribute(gather_gemm<Cfg, plain_epilogue, push_mover, dense_gather_globals<Cfg>>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, gather_shared_bytes<Cfg, push_mover>()), "ag_gemm");
    check_cuda(cudaFuncSetAttribute(gemm_scatter<Cfg, reduce_finish, dense_scatter_globals<Cfg>>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<Cfg, bf16>()), "gemm_rs");
}

template <class Cfg> constexpr dense_variant make_dense(const char *name) {
    return {name, Cfg::BLOCK_M, Cfg::BLOCK_N, prepare_variant<Cfg>, launch_dense_gather<Cfg>, launch_dense_scatter<Cfg>};
}

}  // namespace

const dense_variant dense_variants[] = {make_dense<dense_64>("64x256"), make_dense<dense_128>("128x256")};
const int num_dense_variants = sizeof(dense_variants) / sizeof(dense_variants[0]);

void prepare_dense() {
    for (const dense_variant &variant : dense_variants) variant.prepare();
    cudaFuncAttributes attributes;  // loads the kernels: nothing may be loaded while a rank waits
    check_cuda(cudaFuncGetAttributes(&attributes, open_dense), "open_dense");
    check_cuda(cudaFuncGetAttributes(&attributes, seal_dense), "seal_dense");
}

void launch_open_dense(const dense_view &v, const dense_call &call, int first, cudaStream_t stream) {
    const dense_variant &variant = dense_variants[call.variant];
    const open_dense_globals g{.view = v, .signature = call.signature, .num_tokens = call.num_tokens, .refused = call.refused,
                               .blocks = kittens::ceil_div(call.num_tokens, variant.row_block), .block_m = variant.row_block,
                               .col_blocks = kittens::ceil_div(call.n, variant.col_block), .first = first};
    open_dense<<<1, DENSE_THREADS, 0, stream>>>(g);
    check_cuda(cudaGetLastError(), "open_dense launch");
}

void launch_seal_dense(const dense_view &v, const dense_call &call, cudaStream_t stream) {
    const int64_t vectors = int64_t(v.call.world) * call.num_tokens * call.n / 8;
    const int blocks = int(std::min<int64_t>(v.num_sms, (vectors + 1023) / 1024));
    if (blocks > 0) launch(seal_dense, blocks, 256, 1, 0, false, stream, v.call, static_cast<uint4 *>(call.out), vectors);
}

}  // namespace moe_tk::nvlink
