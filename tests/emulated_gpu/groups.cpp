// NCCL and gloo as they are where there are GPUs, both done by gloo on the memory of tensors.
#include "groups.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Started = c10::intrusive_ptr<Work>;

namespace {

class Group final : public Backend {
 public:
  Group(c10::intrusive_ptr<Backend> gloo, std::string name)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), name_(name) {}

  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  // What gloo does with tensors of a GPU, too.
  Started broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    auto same = seen(tensors, true);
    return gloo_->broadcast(same, options);
  }
  Started allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    auto same = seen(tensors, true);
    return gloo_->allreduce(same, options);
  }

  // What it does with the CPU's only.
  Started allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    auto same = seen(tensors);
    return gloo_->allreduce_coalesced(same, options);
  }
  Started reduce(Tensors& tensors, const ReduceOptions& options) override {
    auto same = seen(tensors);
    return gloo_->reduce(same, options);
  }
  Started allgather(Lists& out, Tensors& in, const AllgatherOptions& options) override {
    auto to = seen(out);
    auto from = seen(in);
    return gloo_->allgather(to, from, options);
  }
  Started _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& options) override {
    auto to = seen(out), from = seen(in);
    return gloo_->_allgather_base(to, from, options);
  }
  Started allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& options) override {
    auto to = seen(out), from = seen(in);
    return gloo_->allgather_into_tensor_coalesced(to, from, options);
  }
  Started gather(Lists& out, Tensors& in, const GatherOptions& options) override {
    auto to = seen(out);
    auto from = seen(in);
    return gloo_->gather(to, from, options);
  }
  Started scatter(Tensors& out, Lists& in, const ScatterOptions& options) override {
    auto to = seen(out);
    auto from = seen(in);
    return gloo_->scatter(to, from, options);
  }
  Started reduce_scatter(Tensors& out, Lists& in, const ReduceScatterOptions& options) override {
    auto to = seen(out);
    auto from = seen(in);
    return gloo_->reduce_scatter(to, from, options);
  }
  Started _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& options) override {
    auto to = seen(out), from = seen(in);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  Started reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& options) override {
    auto to = seen(out), from = seen(in);
    return gloo_->reduce_scatter_tensor_coalesced(to, from, options);
  }
  Started alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const AllToAllOptions& options) override {
    auto to = seen(out), from = seen(in);
    return gloo_->alltoall_base(to, from, out_sizes, in_sizes, options);
  }
  Started alltoall(Tensors& out, Tensors& in, const AllToAllOptions& options) override {
    auto to = seen(out), from = seen(in);
    return gloo_->alltoall(to, from, options);
  }
  Started send(Tensors& tensors, int to, int tag) override {
    auto same = seen(tensors);
    return gloo_->send(same, to, tag);
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    auto same = seen(tensors);
    return gloo_->recv(same, from, tag);
  }
  Started barrier(const BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  Tensor seen(const Tensor& tensor, bool gloo_takes_it = false) const {
    if (name_ == "gloo") {
      TORCH_CHECK(gloo_takes_it || !tensor.is_cuda(), "gloo: unsupported device type cuda");
      return tensor.is_cuda() ? on_cpu(tensor) : tensor;
    }
    TORCH_CHECK(tensor.is_cuda(), "nccl: no backend type associated with device type cpu");
    TORCH_CHECK(tensor.is_contiguous(), "nccl: tensors must be contiguous");
    return on_cpu(tensor);
  }
  Tensors seen(const Tensors& tensors, bool gloo_takes_it = false) const {
    Tensors same;
    for (auto& tensor : tensors) same.push_back(seen(tensor, gloo_takes_it));
    return same;
  }
  Lists seen(const Lists& lists) const {
    Lists same;
    for (auto& tensors : lists) same.push_back(seen(tensors));
    return same;
  }

  c10::intrusive_ptr<Backend> gloo_;
  std::string name_;
};

}  // namespace

void define_groups(pybind11::module_& module) {
  pybind11::module_::import("torch.distributed");
  pybind11::class_<Group, c10::intrusive_ptr<Group>, Backend>(module, "Group", pybind11::dynamic_attr())
      .def(pybind11::init<c10::intrusive_ptr<Backend>, std::string>());
}
