#pragma once
#include <ATen/core/Tensor.h>

constexpr int DEVICES = 8;
extern thread_local c10::DeviceIndex current_device;

/// The same memory as a tensor of the CPU, which keeps it alive.
at::Tensor on_cpu(const at::Tensor& tensor);
