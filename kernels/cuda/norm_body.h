// kernels/cuda/norm_body.h: the norm's arithmetic for a warp (kernels/norm.h, N1 to N3;
// kernels/powers.h, R1 to R3).
//
// B2 Lane l of a warp adds elements l, l + 32, ... of a block in double, in that order, and the
// warp adds
//    its lanes over the tree 16, 8, 4, 2, 1: the CPU's bits. What follows is integers: any order.
// B3 A superaccumulator is spread over a warp, word k with lane k. A word takes less than 2^32 from
// each
//    block, so that 2^31 blocks, 2^41 elements, fit.
// Compiled for the GPU (norm.cu) and, for tests, for the CPU.
#pragma once

#include "kernels/cuda/elements.h"
#include "kernels/cuda/fragment.h"
#include "kernels/cuda/geometry.h"
#include "kernels/inline.h"
#include "kernels/norm.h"
#include "kernels/powers.h"
#include "kernels/superaccumulator.h"

#include <cstddef>
#include <cstdint>

namespace tandem::kernels::cuda {

static_assert(kNormLanes == kWarp, "B2 a lane of the norm is a lane of a warp");
static_assert(Superaccumulator::kWords <= kWarp, "B3 a warp holds a superaccumulator");

/// Lane `lane`'s sum over one block x[0, numel), numel <= kNormBlock.
// NOLINTNEXTLINE(bugprone-easily-swappable-parameters): an array, then a lane
TANDEM_KERNEL_INLINE double lane_sum(const float* x, std::int32_t numel, int lane) {
  double sum = 0.0;
  if (numel == kNormBlock) {
    // All are asked for before the first is added: the sum's order leaves no other parallelism.
    float values[kNormBlock / kWarp];
    TANDEM_UNROLL
    for (int k = 0; k < kNormBlock / kWarp; ++k) values[k] = x[k * kWarp + lane];
    TANDEM_UNROLL
    for (int k = 0; k < kNormBlock / kWarp; ++k) {
      const double value = values[k];
      sum += value * value;
    }
    return sum;
  }
  for (std::int32_t i = lane; i < numel; i += kWarp) {
    const double value = x[i];
    sum += value * value;
  }
  return sum;
}

/// The same of (|x| / divisor)^p. The warp's sum is then put on the grid (R2).
// NOLINTNEXTLINE(bugprone-easily-swappable-parameters): an array, then a lane
TANDEM_KERNEL_INLINE double lane_sum(const float* x,
                                     std::int32_t numel,
                                     int lane,
                                     const Power& power) {
  double sum = 0.0;
  for (std::int32_t i = lane; i < numel; i += kWarp) sum += term_of(x[i], power);
  return sum;
}

/// Lane `lane`'s part of the largest magnitude of x[0, numel).
// NOLINTNEXTLINE(bugprone-easily-swappable-parameters): an array, then a lane
TANDEM_KERNEL_INLINE std::uint32_t lane_largest(const float* x, std::int32_t numel, int lane) {
  std::uint32_t largest = 0;
  for (std::int32_t i = lane; i < numel; i += kWarp) {
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x[i]) & 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

/// What Superaccumulator::add(x) adds to its word `word`, for the same x.
// NOLINTNEXTLINE(bugprone-easily-swappable-parameters): a value, then a word
TANDEM_KERNEL_INLINE std::int64_t word_of(double x, int word) {
  const std::uint64_t bits = __builtin_bit_cast(std::uint64_t, x) & 0x7FFFFFFFFFFFFFFFU;  // |x|: -0
  const std::uint64_t bound = __builtin_bit_cast(std::uint64_t, Superaccumulator::kBound);
  // Infinities and NaNs have larger bits than any finite number.
  if (bits >= bound) return word == Superaccumulator::kLimbs ? 1 : 0;
  if (word >= Superaccumulator::kLimbs) return 0;
  const auto biased = static_cast<int>(bits >> 52);
  std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52) - 1);
  if (biased != 0) mantissa |= std::uint64_t{1} << 52;
  // x = mantissa * 2^(position - 320)
  int position = (biased != 0 ? biased : 1) - 1075 + 320;
  if (position < 0) {  // S1: what is dropped is zeros
    mantissa = position > -64 ? mantissa >> -position : 0;
    position = 0;
  }
  // Digit `word` of mantissa << position: of the three that 53 bits can touch, or 0.
  const int digit = word - position / 32;
  const int shift = position % 32;
  if (digit == 0) return static_cast<std::int64_t>((mantissa << shift) & 0xFFFFFFFFU);
  if (digit == 1) return static_cast<std::int64_t>((mantissa >> (32 - shift)) & 0xFFFFFFFFU);
  if (digit == 2 && shift > 0) return static_cast<std::int64_t>(mantissa >> (64 - shift));
  return 0;
}

struct NormLaunch {
  /// Blocks of the first of the two launches; each leaves its words.
  static constexpr std::int64_t kMostBlocks = 1024;
  static constexpr std::size_t kPartialBytes =
      kMostBlocks * Superaccumulator::kWords * sizeof(std::int64_t);

  const Piece* pieces = nullptr;  // [count], device
  std::int64_t count = 0;
  const Fragment* fragments = nullptr;    // device
  const unsigned char* chosen = nullptr;  // per fragment, device
  std::int64_t* partials = nullptr;       // kPartialBytes, device; undefined before and after
  std::int64_t* words = nullptr;          // [Superaccumulator::kWords], device: the result, or
                                          // the largest magnitude's bits in the first
  Power power;                            // of a sum of powers
};

/// Where thread block `block` of `blocks` leaves word `word`: word by word, so that the second
/// kernel reads neighbours.
TANDEM_KERNEL_INLINE std::int64_t partial_index(int word, std::int64_t block, std::int64_t blocks) {
  return word * blocks + block;
}

/// Thread blocks of the first launch.
inline std::int64_t norm_blocks(std::int64_t pieces) {
  const std::int64_t wanted = blocks_for(pieces, kWarps);
  return wanted < NormLaunch::kMostBlocks ? wanted : NormLaunch::kMostBlocks;
}

}  // namespace tandem::kernels::cuda
