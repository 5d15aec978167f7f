// In place of CUDA's: the shared memory of the other blocks of a cluster.
#pragma once

#include "machine.hpp"

namespace cooperative_groups {

struct cluster_group {
    template <class T> T *map_shared_rank(T *mine, int rank) const {
        const emulator::fiber &f = *emulator::current;
        const emulator::shared_block &to = f.of_cluster->blocks[rank], &from = f.of_cluster->blocks[f.block.x];
        if (to.begun == 0 || to.ended > 0) emulator::fail("shared memory of a block that has not begun or has left");
        return reinterpret_cast<T *>(to.memory + (reinterpret_cast<char *>(mine) - from.memory));
    }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
