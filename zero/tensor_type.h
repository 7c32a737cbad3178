// zero/tensor_type.h: the element types that LibTorch and Tandem share, and tensors over our
// memory. Called by zero and engine.
#pragma once

#include "kernels/dtype.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace at {
class Tensor;
}

namespace tandem::zero {

inline constexpr int kCpu = -1;

/// Nothing for types that Tandem does not train.
[[nodiscard]] std::optional<kernels::Dtype> dtype_of(const at::Tensor& tensor);

/// A contiguous tensor over `data`, which `keep` (if any) keeps alive as long as the tensor; on the
/// CPU, or on the CUDA device of that index.
[[nodiscard]] at::Tensor tensor_over(std::byte* data,
                                     std::span<const std::int64_t> sizes,
                                     kernels::Dtype dtype,
                                     std::shared_ptr<void> keep = nullptr,
                                     int cuda_index = kCpu);

}  // namespace tandem::zero
