// The operations' part of the NVLink module.
#pragma once

#include <pybind11/pybind11.h>

#include "../nvlink/layer.cuh"

namespace moe_tk::bindings {

nvlink::workspace_view workspace_of(const pybind11::dict &values);  // fields as of the layer's workspace
void add_nvlink_ops(pybind11::module_ &m);

}  // namespace moe_tk::bindings
