// kernels/norm.cpp: cuts a parameter into blocks and adds their sums of squares.
#include "kernels/norm.h"

#include "kernels/check.h"
#include "kernels/cpu_kernels.h"
#include "kernels/denormals.h"

#include <algorithm>

namespace tandem::kernels {

double block_sum_of_squares(const float* x, std::int64_t numel) {
  TANDEM_ASSERT(numel >= 0 && numel <= kNormBlock, "N1 a block has at most kNormBlock elements");
  const KeepDenormals keep;
  return cpu_kernels().block_sum_of_squares(x, numel);
}

void add_sum_of_squares(const float* x, std::int64_t numel, Superaccumulator& sum) {
  TANDEM_ASSERT(numel >= 0, "a range has no negative length");
  const CpuKernels& table = cpu_kernels();
  const KeepDenormals keep;
  for (std::int64_t begin = 0; begin < numel; begin += kNormBlock) {
    sum.add(table.block_sum_of_squares(x + begin, std::min(kNormBlock, numel - begin)));
  }
}

}  // namespace tandem::kernels
