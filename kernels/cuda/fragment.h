// kernels/cuda/fragment.h: a fragment of an optimizer shard as the kernels read it.
// Called by kernels/cuda's table, update and norm.
#pragma once

#include "kernels/cuda/elements.h"
#include "kernels/update.h"

#include <cstddef>
#include <cstdint>

namespace tandem::kernels::cuda {

enum class Stored : std::uint8_t { kFp32, kBf16Masters, kBf16Remainders, kFp16Masters };

/// UpdateArrays as a kernel reads them.
struct Fragment {
  const float* grad = nullptr;
  void* param = nullptr;
  float* master = nullptr;
  std::uint16_t* remainder = nullptr;
  float* state[kMaxStates] = {};
  Stored stored = Stored::kFp32;
  bool vector = false;  // every array there is begins where groups do (E1)
};

inline Fragment fragment_of(const UpdateArrays& arrays) {
  Fragment fragment;
  fragment.grad = arrays.grad;
  fragment.param = arrays.param;
  fragment.master = arrays.master;
  fragment.remainder = arrays.remainder;
  fragment.stored = arrays.remainder != nullptr              ? Stored::kBf16Remainders
                    : arrays.param_dtype == Dtype::kBFloat16 ? Stored::kBf16Masters
                    : arrays.param_dtype == Dtype::kFloat16  ? Stored::kFp16Masters
                                                             : Stored::kFp32;
  fragment.vector = vector_start(arrays.grad, 4) &&
                    vector_start(arrays.param, bytes_of(arrays.param_dtype)) &&
                    vector_start(arrays.master, 4) && vector_start(arrays.remainder, 2);
  for (std::size_t k = 0; k < kMaxStates; ++k) {
    fragment.state[k] = arrays.state[k];
    fragment.vector = fragment.vector && vector_start(arrays.state[k], 4);
  }
  return fragment;
}

}  // namespace tandem::kernels::cuda
