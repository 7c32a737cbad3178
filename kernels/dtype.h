// kernels/dtype.h: the element types that parameters, gradients and wires may have.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tandem::kernels {

enum class Dtype : std::uint8_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr std::size_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

constexpr const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return "bf16";
    case Dtype::kFloat16:
      return "fp16";
    case Dtype::kFloat32:
      break;
  }
  return "fp32";
}

}  // namespace tandem::kernels
