// Tensors of CUDA devices in this machine's memory: where it comes from, and how every operation is done by the CPU's kernel.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <set>
#include <string>

#include "groups.h"

using at::Tensor;
using c10::Device;
using c10::DeviceType;
using c10::IntArrayRef;
using std::optional;

namespace {

const c10::DispatchKeySet CPU(c10::DispatchKey::CPU), CUDA(c10::DispatchKey::CUDA);

std::atomic<int64_t> host_reads{0}, allocated{0}, peak{0};
std::atomic<bool> reuses{true};

// ---- the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  // The autograd engine's own streams: everything is done when the call that asked for it returns.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Memory {
  void* start;
  size_t bytes;
};

void give_back(void* context) {
  auto* memory = static_cast<Memory*>(context);
  allocated -= memory->bytes;
  if (reuses) std::free(memory->start);
  delete memory;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    if (bytes && posix_memalign(&start, 64, bytes)) throw std::bad_alloc();
    int64_t now = allocated += bytes, before = peak;
    while (before < now && !peak.compare_exchange_weak(before, now)) {
    }
    return {start, new Memory{start, bytes}, &give_back, Device(DeviceType::CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} allocator;

struct OnDevice {  // what is allocated meanwhile is this device's
  c10::DeviceIndex before = current_device;
  explicit OnDevice(optional<Device> device) {
    if (device && device->has_index()) current_device = device->index();
  }
  ~OnDevice() { current_device = before; }
};

// ---- operations: by default the CPU's, on the same memory

Tensor like(const Tensor& tensor, c10::Storage storage) {
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), CUDA, tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  out.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  return out;
}

const std::set<std::string> MAY_MIX{"aten::index.Tensor", "aten::_index_put_impl_"};  // with indices on the CPU

struct Call {
  std::vector<std::pair<Tensor, Tensor>> arguments;  // ours, and what the CPU sees
  bool has_cpu_tensor = false;
  Device device{DeviceType::CUDA, current_device};

  Tensor lend(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      has_cpu_tensor |= tensor.dim() > 0;
      return tensor;
    }
    device = tensor.device();
    return arguments.emplace_back(tensor, on_cpu(tensor)).second;
  }

  Tensor take_back(const Tensor& result) const {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [ours, theirs] : arguments)
      if (result.is_same(theirs)) return ours;
    for (auto& [ours, theirs] : arguments)
      if (result.storage().data() && result.storage().data() == theirs.storage().data())
        return like(result, c10::Storage(ours.storage()));  // a view
    OnDevice on(device);
    Tensor out = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), &allocator, CUDA, result.scalar_type());
    on_cpu(out).copy_(result);
    return out;
  }
};

void by_the_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  auto& schema = operation.schema();
  auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  Call call;
  for (auto value = stack->end() - schema.arguments().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = call.lend(value->toTensor());
    } else if (value->isTensorList()) {
      auto tensors = value->toTensorVector();
      for (auto& tensor : tensors) tensor = call.lend(tensor);
      *value = c10::List<Tensor>(tensors);
    } else if (value->isOptionalTensorList()) {
      c10::List<optional<Tensor>> tensors;
      for (optional<Tensor> tensor : value->toOptionalTensorList())
        tensors.push_back(tensor ? optional<Tensor>(call.lend(*tensor)) : std::nullopt);
      *value = tensors;
    } else if (value->isDevice() && value->toDevice().is_cuda()) {
      if (value->toDevice().has_index()) call.device = value->toDevice();
      *value = Device(DeviceType::CPU);
    }
  }
  TORCH_CHECK(
      !call.has_cpu_tensor || call.arguments.empty() || MAY_MIX.count(name),
      "Expected all tensors to be on the same device, but ", name, " was given some of cuda and some of cpu");
  operation.redispatchBoxed(CPU, stack);
  for (auto& [ours, theirs] : call.arguments)
    if (!theirs.sizes().equals(ours.sizes())) {  // an output that has grown
      ours.resize_(theirs.sizes());
      on_cpu(ours).copy_(theirs);
    }
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = call.take_back(value->toTensor());
    } else if (value->isTensorList()) {
      auto tensors = value->toTensorVector();
      for (auto& tensor : tensors) tensor = call.take_back(tensor);
      *value = c10::List<Tensor>(tensors);
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

// ---- operations: those that make, move and reshape memory

using Dtype = optional<at::ScalarType>;
using Layout = optional<at::Layout>;

Tensor empty(
    IntArrayRef size, Dtype dtype, Layout, optional<Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &allocator, CUDA, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, Dtype dtype, Layout, optional<Device> device, optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, CUDA, at::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda() && !non_blocking) host_reads++;
  (self.is_cuda() ? on_cpu(self) : self).copy_(source.is_cuda() ? on_cpu(source) : source);
  return self;
}

at::Scalar item(const Tensor& self) {
  host_reads++;
  return on_cpu(self).item();
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  OnDevice on(self.device());
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto values = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, source, 0, {values}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

int64_t unfused_attention(
    const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool, optional<double>, bool) {
  return 0;  // fused ones are a device's own operations
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &item);
  library.impl("view", &at::native::view);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_fused_sdp_choice", &unfused_attention);
  // Without a kernel of the device's torch would do this by others, which round differently.
  library.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

void resize_storage(const Tensor& whole, int64_t bytes) {
  at::native::resize_bytes_cpu(whole.storage().unsafeGetStorageImpl(), bytes);
}

void let_go(void* context) { delete static_cast<c10::Storage*>(context); }

}  // namespace

Tensor on_cpu(const Tensor& tensor) {
  auto& storage = tensor.storage();
  c10::DataPtr memory(const_cast<void*>(storage.data()), new c10::Storage(storage), &let_go, Device(DeviceType::CPU));
  c10::Storage same(
      c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(memory), c10::GetAllocator(DeviceType::CPU), true);
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(std::move(same), CPU, tensor.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  out.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  return out;
}

PYBIND11_MODULE(emulated, module) {
  c10::SetAllocator(DeviceType::CUDA, &allocator, 100);
  module.def("host_reads", [] { return host_reads.load(); }, "How often the host has waited for a value of a device.");
  module.def("allocated", [] { return allocated.load(); }, "Bytes of all devices.");
  module.def("peak", [] { return peak.load(); });
  module.def("forget_peak", [] { peak = allocated.load(); });
  module.def("reuse_memory", [](bool reuse) { reuses = reuse; }, "Or let no address stand for two tensors.");
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int device) { current_device = device; });
  module.def("resize_storage", &resize_storage);
  define_groups(module);
}
