// kernels/powers.cpp: sums of powers and maxima on the CPU, and what a norm needs around them.
#include "kernels/powers.h"

#include "kernels/check.h"
#include "kernels/cpu_kernels.h"
#include "kernels/denormals.h"
#include "kernels/norm.h"

#include <algorithm>
#include <bit>

namespace tandem::kernels {
Power power_of(double p, double largest) {
  TANDEM_ASSERT(p > 0.0 && std::isfinite(p), "a power is finite and > 0");
  Power power;
  power.p = p;
  const bool multiply = p <= Power::kMostMultiplied && p == std::floor(p);
  power.multiply = multiply ? static_cast<std::int32_t>(p) : 0;
  if (largest > 0.0 && std::isfinite(largest)) {
    power.divisor = p <= Power::kMostMultiplied ? std::ldexp(1.0, std::ilogb(largest)) : largest;
  }
  return power;
}

double norm_of(double sum, const Power& power) {
  if (power.p == 1.0) return power.divisor * sum;
  if (power.p == 2.0) return power.divisor * std::sqrt(sum);
  return power.divisor * std::pow(sum, 1.0 / power.p);
}

void add_sum_of_powers(const float* x,
                       std::int64_t numel,
                       const Power& power,
                       Superaccumulator& sum) {
  TANDEM_ASSERT(numel >= 0, "a range has no negative length");
  const CpuKernels& table = cpu_kernels();
  const KeepDenormals keep;
  for (std::int64_t begin = 0; begin < numel; begin += kNormBlock) {
    sum.add(table.block_sum_of_powers(x + begin, std::min(kNormBlock, numel - begin), power));
  }
}

std::uint32_t largest_magnitude(const float* x, std::int64_t numel) {
  TANDEM_ASSERT(numel >= 0, "a range has no negative length");
  return cpu_kernels().largest_magnitude(x, numel);
}

double magnitude_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

}  // namespace tandem::kernels
