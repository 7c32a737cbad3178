// kernels/fold.h: the sum of R slices, one after another in rank order, into an fp32 accumulator.
//
// F1 Element i depends on element i of the slices only, never on where a range was cut.
// F2 The additions happen in the order of `slices`: ((acc + s0) + s1) + ..., each in fp32.
// F3 A slice without data stands for zeros and costs nothing: acc is never -0, so x + 0 = x.
// multiply() is what a sum may need between two folds.
// Called by comm (reductions) and zero (gradients held locally).
#pragma once

#include "kernels/dtype.h"

#include <cstdint>
#include <span>

namespace tandem::kernels {

struct Slice {
  const void* data = nullptr;  // [numel] of dtype, or null for zeros
  Dtype dtype = Dtype::kFloat32;
};

enum class Accumulator : std::uint8_t {
  kContinue,  // acc holds a sum already
  kFresh,     // acc is undefined and counts as +0; saves its reading and its clearing
};

/// acc[i] = (fresh ? +0 : acc[i]) + slices[0][i] + slices[1][i] + ..., left to right in fp32.
/// Moves numel * (bytes of every slice with data + 4 or 8) bytes. Blocking, on the calling thread.
void fold(std::span<const Slice> slices, std::int64_t numel, float* acc, Accumulator state);

/// x[i] *= factor, in fp32; denormals are kept. On the calling thread.
void multiply(float* x, float factor, std::int64_t numel);

}  // namespace tandem::kernels
