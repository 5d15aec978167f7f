// In place of CUDA's: the cluster's barrier.
#pragma once

#include "machine.hpp"

namespace cooperative_groups {

struct cluster_group {
    void sync() const { emulator::meet(*emulator::current->of_cluster); }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
