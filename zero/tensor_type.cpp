#include "zero/tensor_type.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <utility>

namespace tandem::zero {

std::optional<kernels::Dtype> dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::Dtype::kFloat32;
    case at::kBFloat16:
      return kernels::Dtype::kBFloat16;
    case at::kHalf:
      return kernels::Dtype::kFloat16;
    default:
      return std::nullopt;
  }
}

at::Tensor tensor_over(std::byte* data,
                       std::span<const std::int64_t> sizes,
                       kernels::Dtype dtype,
                       std::shared_ptr<void> keep,
                       int cuda_index) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  static_assert(static_cast<int>(kernels::Dtype::kFloat32) == 0 &&
                static_cast<int>(kernels::Dtype::kBFloat16) == 1 &&
                static_cast<int>(kernels::Dtype::kFloat16) == 2);
  const c10::Device device =
      cuda_index == kCpu ? c10::Device(c10::kCPU)
                         : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(cuda_index));
  return at::from_blob(
      data, at::IntArrayRef(sizes.data(), sizes.size()), [keep = std::move(keep)](void*) {},
      at::TensorOptions().dtype(kTypes[static_cast<int>(dtype)]).device(device), device);
}

}  // namespace tandem::zero
