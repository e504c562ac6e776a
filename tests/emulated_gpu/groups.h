#pragma once
#include <torch/csrc/utils/pybind.h>

void define_groups(pybind11::module_& module);
