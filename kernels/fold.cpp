// kernels/fold.cpp: hands fold() to the instruction set in use.
#include "kernels/fold.h"

#include "kernels/check.h"
#include "kernels/cpu_kernels.h"
#include "kernels/denormals.h"

namespace tandem::kernels {

void fold(std::span<const Slice> slices, std::int64_t numel, float* acc, Accumulator state) {
  TANDEM_ASSERT(numel >= 0, "a fold has no negative length");
  TANDEM_ASSERT(numel == 0 || acc != nullptr, "a fold has an accumulator");
  const KeepDenormals keep;
  cpu_kernels().fold(slices.data(), static_cast<std::int64_t>(slices.size()), numel, acc, state);
}

void multiply(float* x, float factor, std::int64_t numel) {
  TANDEM_ASSERT(numel >= 0, "a range has no negative length");
  const KeepDenormals keep;
  cpu_kernels().multiply(x, factor, numel);
}

}  // namespace tandem::kernels
