// The tile library: include this one.
#pragma once

#include "common/base.cuh"
#include "ops/group.cuh"
#include "ops/memory.cuh"
#include "ops/sync.cuh"
#include "ops/tma.cuh"
#include "types/gl.cuh"
#include "types/pgl.cuh"
#include "types/rt.cuh"
#include "types/st.cuh"
