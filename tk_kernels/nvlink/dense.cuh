// The dense operations over NVLink: AG+GEMM and GEMM+RS are the two persistent templates with one expert that every rank
// wants all rows of, so their tables are known from the number of rows alone.
//
// Row blocks do not cross the parts of two ranks: block b of the part of rank r is number r * blocks + b. A task's `segment` is
// that rank. Rows are [rank, row of its part] everywhere, and the last block of a part ends at the tensor's edge.
#pragma once

#include <cstdint>

#include "wait.cuh"

namespace moe_tk::nvlink {

enum dense_word { DENSE_TASKS, DENSE_COMPUTED, DENSE_NEXT_PUSH, DENSE_NEXT_ROW, NUM_DENSE_WORDS };

// What lives as long as a workspace. Of the heap, AG+GEMM keeps the other ranks' rows in the planes, GEMM+RS the partial rows;
// `combined` holds the epoch of each (rank, row block) of a plane.
struct dense_view {
    call_view call;      // hidden: elements of a plane's row; job_chunks: row blocks of a rank, at most
    int4 *tasks;         // [R * job_chunks * column blocks] (rank, 0, row block, column block)
    int *block_rows;     // [R * job_chunks]
    uint32_t *done;      // [R * job_chunks] rows sent (AG+GEMM) or column blocks finished (GEMM+RS)
    uint32_t *words;     // [NUM_DENSE_WORDS]
    uint32_t *epoch;
    int max_columns;     // of the product on this rank
    int num_sms;
};

struct dense_call {
    const void *x;       // AG+GEMM: [num_tokens, k]; GEMM+RS: [R, num_tokens, k]
    const void *weight;  // [n, k]
    void *out;           // AG+GEMM: [R, num_tokens, n]; GEMM+RS: [num_tokens, n]
    uint64_t signature;
    int num_tokens, refused, variant, k, n;
};

// Epoch of a row block of the plane of rank `from` at rank `owner`.
__device__ __forceinline__ uint32_t *block_flag(const call_view &c, int owner, int from, int block) {
    return c.region<uint32_t>(owner, c.at.combined) + from * c.job_chunks + block;
}

enum dense_stage { DENSE_OPEN = 1, DENSE_RUN = 2, DENSE_SEAL = 4 };

struct dense_variant {
    const char *name;
    int row_block, col_block;
    void (*prepare)();
    void (*gather)(const dense_view &, const dense_call &, cudaStream_t);
    void (*scatter)(const dense_view &, const dense_call &, cudaStream_t);
};
extern const dense_variant dense_variants[];
extern const int num_dense_variants;

void prepare_dense();
// First launch. `first` is the distance, in ranks, of the part that is computed first.
void launch_open_dense(const dense_view &, const dense_call &, int first, cudaStream_t);
// Last launch of AG+GEMM: NaN in place of a result that is none.
void launch_seal_dense(const dense_view &, const dense_call &, cudaStream_t);

}  // namespace moe_tk::nvlink
