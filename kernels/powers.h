// kernels/powers.h: p-norms other than 2: the largest magnitude, and sums of powers with the same
// bits for every number of ranks and threads and every cut into buckets.
//
// Blocks, lanes and tree are those of kernels/norm.h (N1, N2); blocks are added exactly (N3).
// R1 A term is (|x| / divisor)^p in double. Where p > 1 the divisor comes from the joint maximum
//    (power_of), so that the largest term is at least 1 and no sum overflows, whatever p.
// R2 A block's sum is rounded to a multiple of 2^-320, which is all that a superaccumulator holds:
//    what is lost is below 2^-320 of the largest term, and nothing where p <= 1.
// R3 p = 1, 2, ..., kMostMultiplied: multiplications, the same bits on every device. Other p:
//    pow() of the C library or of the GPU, whose last bits may differ between kinds of processors.
// Called by devices (kernels/device.h), by zero and by engine (the joint norm).
#pragma once

#include "kernels/inline.h"
#include "kernels/superaccumulator.h"

#include <cmath>
#include <cstdint>

namespace tandem::kernels {

/// How the terms of a sum of powers are made.
struct Power {
  static constexpr int kMostMultiplied = 64;

  double p = 2.0;             // > 0, finite
  std::int32_t multiply = 2;  // p, where multiplications do; else 0
  double divisor = 1.0;       // > 0
};

/// Whether a norm of that type takes a pass for the largest magnitude: infinity, which takes
/// nothing else, and p > 1 but for 2, whose sums fit as they are.
inline bool needs_largest(double p) { return p > 1.0 && p != 2.0; }

/// For values of which `largest` is the largest magnitude (0 where needs_largest() says no). p <=
/// kMostMultiplied: divided by the power of two at or below it, which rounds nothing; beyond, where
/// 2^p would be too large, by itself.
Power power_of(double p, double largest);

/// (sum of |x|^p)^(1 / p), where `sum` is that of the terms: torch.linalg.vector_norm.
double norm_of(double sum, const Power& power);

/// (|x| / divisor)^p. Non-finite for non-finite x.
TANDEM_KERNEL_INLINE double term_of(double x, const Power& power) {
  const double base = (x < 0.0 ? -x : x) / power.divisor;
  if (power.multiply == 0) return std::pow(base, power.p);
  double term = 1.0;
  double square = base;
  for (std::int32_t rest = power.multiply; rest != 0; rest /= 2) {
    if (rest % 2 != 0) term *= square;
    square *= square;
  }
  return term;
}

/// R2, to nearest; x >= 0. From 2^-268 on a double has no bits below 2^-320, and adding 2^-268 to
/// less rounds there.
TANDEM_KERNEL_INLINE double on_grid(double x) { return x < 0x1p-268 ? x + 0x1p-268 - 0x1p-268 : x; }

/// Adds the blocks of x[0, numel) to `sum`; x starts at a multiple of kNormBlock elements of its
/// parameter. Non-finite blocks are counted instead. Reads 4 * numel bytes.
void add_sum_of_powers(const float* x,
                       std::int64_t numel,
                       const Power& power,
                       Superaccumulator& sum);

/// The largest |x[i]| as the bits of a float, 0 if there is none. They order as magnitudes do, with
/// infinities and then NaNs above all finite ones. Reads 4 * numel bytes.
std::uint32_t largest_magnitude(const float* x, std::int64_t numel);

/// What those bits are: a magnitude, infinity or NaN.
double magnitude_of(std::uint32_t bits);

}  // namespace tandem::kernels
