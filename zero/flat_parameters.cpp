// zero/flat_parameters.cpp: turns tensors into views of flat buckets, and back when users moved
// them.
#include "zero/flat_parameters.h"

#include "kernels/check.h"
#include "zero/tensor_type.h"
#include <tandem/error.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace tandem::zero {
namespace {

/// "fp32 [2, 3]", as describe() writes it; LibTorch's names for types that Tandem has none for.
std::string type_and_shape(const at::Tensor& tensor) {
  const std::optional<kernels::Dtype> dtype = dtype_of(tensor);
  std::string text = dtype ? kernels::name_of(*dtype) : c10::toString(tensor.scalar_type());
  text += " [";
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(tensor.size(d));
  }
  text += "]";
  if (!tensor.device().is_cpu()) text += " on " + tensor.device().str();
  return text;
}

}  // namespace

struct FlatParameters::Impl {
  std::shared_ptr<std::byte> memory;
  std::size_t bytes = 0;
  std::vector<std::int64_t> bucket_offsets;  // bytes
  std::vector<at::Tensor> tensors;           // the users'
  std::vector<at::Tensor> views;             // where each of them belongs

  [[nodiscard]] bool moved(std::size_t i) const {
    const at::Tensor& tensor = tensors[i];
    const at::Tensor& view = views[i];
    // An empty tensor has no address to compare.
    return tensor.scalar_type() != view.scalar_type() || tensor.device() != view.device() ||
           tensor.sizes() != view.sizes() ||
           (view.numel() != 0 &&
            (tensor.const_data_ptr() != view.const_data_ptr() || !tensor.is_contiguous()));
  }

  /// set_data keeps the tensor's identity, its hooks and whether it requires a gradient.
  void view(std::size_t i) { tensors[i].set_data(views[i]); }

  [[nodiscard]] bool inside(const at::Tensor& tensor) const {
    if (!tensor.has_storage()) return false;
    const auto* data = static_cast<const std::byte*>(tensor.storage().data());
    return data >= memory.get() && data < memory.get() + bytes;
  }
};

FlatParameters::FlatParameters(const BucketPlan& plan,
                               const TorchDevice& device,
                               std::shared_ptr<std::byte> memory,
                               std::vector<at::Tensor> tensors,
                               Fill fill)
    : impl_(std::make_unique<Impl>()) {
  TANDEM_ASSERT(tensors.size() == plan.bucket_of.size(), "B1 a placement for every tensor");
  const at::NoGradGuard no_grad;
  impl_->memory = std::move(memory);
  impl_->bytes = static_cast<std::size_t>(plan.flat_bytes);
  impl_->tensors = std::move(tensors);
  impl_->views.resize(impl_->tensors.size());
  for (const BucketLayout& bucket : plan.buckets) {
    impl_->bucket_offsets.push_back(bucket.flat_offset);
    const at::Tensor base =
        device.tensor_over(impl_->memory.get() + bucket.flat_offset, std::span(&bucket.numel, 1),
                           bucket.dtype, impl_->memory);
    std::int64_t end = 0;  // of the placement before
    const auto clear_up_to = [&](std::int64_t begin) {
      if (fill == Fill::kCopy && begin > end) base.narrow(0, end, begin - end).zero_();
    };
    for (const Placement& placement : bucket.placements) {
      const auto i = static_cast<std::size_t>(placement.parameter);
      const at::Tensor& tensor = impl_->tensors[i];
      TANDEM_ASSERT(tensor.numel() == placement.numel, "L1 the plan is of these tensors");
      TANDEM_ASSERT(tensor.scalar_type() == base.scalar_type(), "L1 the plan is of these tensors");
      clear_up_to(placement.offset);
      end = placement.offset + placement.numel;
      impl_->views[i] = base.narrow(0, placement.offset, placement.numel).view(tensor.sizes());
      if (fill == Fill::kCopy) impl_->views[i].copy_(tensor);
      impl_->view(i);
    }
    clear_up_to(bucket.numel);
  }
}

FlatParameters::~FlatParameters() = default;

std::int32_t FlatParameters::first_moved() const {
  for (std::size_t i = 0; i < impl_->tensors.size(); ++i) {
    if (impl_->moved(i)) return static_cast<std::int32_t>(i);
  }
  return -1;
}

bool FlatParameters::restore_moved(const std::string& engine,
                                   const std::vector<ParameterInfo>& infos) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<std::size_t, at::Tensor>> moved;  // with what they hold now
  for (std::size_t i = 0; i < impl_->tensors.size(); ++i) {
    if (!impl_->moved(i)) continue;
    const at::Tensor& tensor = impl_->tensors[i];
    const at::Tensor& view = impl_->views[i];
    if (tensor.scalar_type() != view.scalar_type() || tensor.sizes() != view.sizes() ||
        tensor.device() != view.device()) {
      throw InvalidArgument("parameter '" + infos[i].name + "' of engine '" + engine + "' was " +
                            type_and_shape(view) + " when the engine was made and is " +
                            type_and_shape(tensor) +
                            " now; make the engine after changing types, shapes or devices");
    }
    // Two parameters may have been swapped: what lies in our memory is saved before any is written.
    const at::Tensor values = tensor.detach();
    moved.emplace_back(i, impl_->inside(values) ? values.clone() : values);
  }
  for (const auto& [i, values] : moved) {
    impl_->views[i].copy_(values);
    impl_->view(i);
  }
  return !moved.empty();
}

void FlatParameters::touch(const std::vector<bool>& changed) {
  TANDEM_ASSERT(changed.size() == impl_->tensors.size(), "changed has a flag for every parameter");
  for (std::size_t i = 0; i < impl_->tensors.size(); ++i) {
    if (changed[i]) impl_->tensors[i].unsafeGetTensorImpl()->bump_version();
  }
}

const std::vector<at::Tensor>& FlatParameters::tensors() const { return impl_->tensors; }

std::byte* FlatParameters::bucket(std::int32_t index) const {
  return impl_->memory.get() + impl_->bucket_offsets[static_cast<std::size_t>(index)];
}

}  // namespace tandem::zero
