// What starts and runs fibers; kernels do not see it.
#pragma once

#include "machine.hpp"

namespace emulator {

void start(fiber *);  // takes it over
// Runs all fibers, in an order that `seed` draws. Returns the number of those that cannot go on, 0 if all are done.
int run_all(int seed, uint64_t most_idle);

}  // namespace emulator
