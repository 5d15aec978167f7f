// Parallel global layout: the same tensor on every rank, one global layout for each, TMA descriptors included. pgl[r] is rank
// r's memory as this GPU addresses it.
#pragma once

#include <vector>

#include "gl.cuh"

namespace kittens {

template <class GL_, int MAX_RANKS_ = 8> struct pgl {
    using GL = GL_;
    using dtype = typename GL_::dtype;
    static constexpr int MAX_RANKS = MAX_RANKS_;
    alignas(alignof(GL_)) unsigned char storage[MAX_RANKS * sizeof(GL_)];  // a gl cannot be made without a tensor
    int num_ranks;

    pgl(const std::vector<dtype *> &bases, int b, int d, int r, int c, int64_t stride = 0) : num_ranks(int(bases.size())) {
        if (bases.empty() || num_ranks > MAX_RANKS)
            throw std::runtime_error("kittens: a pgl of " + std::to_string(bases.size()) + " ranks, wanted 1 to " +
                                     std::to_string(MAX_RANKS));
        for (int i = 0; i < num_ranks; ++i) new (storage + i * sizeof(GL_)) GL_(bases[i], b, d, r, c, stride);
    }
    __host__ __device__ const GL_ &operator[](int rank) const {
        return *reinterpret_cast<const GL_ *>(storage + rank * sizeof(GL_));
    }
};

}  // namespace kittens
