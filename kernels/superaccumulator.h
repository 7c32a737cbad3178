// kernels/superaccumulator.h: an exact, order-free sum of non-negative doubles.
//
// A fixed-point number of kLimbs 32-bit digits, each in a signed 64-bit word, so that up to 2^31
// values can be added before carries need to run (each adds less than 2^32 to a word), and words of
// several ranks can be added by an integer all-reduce. Digit k weighs 2^(32 k - 320). The range
// covers every sum of squares of fp32 values: from 2^-298 (the smallest square) to 2^297 (2^31
// blocks of 1,024 largest squares) and more: the top word holds sums up to 2^351.
//
// S1 add() is exact and commutative: any order, any split over ranks, the same words after carry.
// S2 value() is the correctly rounded double of the exact sum.
// S3 Non-finite inputs, and those of kBound or more, are counted in the last word and not added.
// Called by kernels/norm, zero and engine (the joint norm).
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace tandem::kernels {

class Superaccumulator {
 public:
  static constexpr int kLimbs = 20;
  static constexpr int kWords = kLimbs + 1;  // the last counts non-finite inputs: 168 bytes in all

  static constexpr double kBound = 0x1p320;

  /// x >= 0 and a multiple of 2^-320 (as every sum of squares of fp32 values is), or non-finite. At
  /// most 2^31 calls between two normalize().
  void add(double x);
  /// Counts towards the 2^31 as often as `other` was added to, once if `other` is normalized.
  void merge(const Superaccumulator& other);
  /// Propagates carries so that each digit but the top one is in [0, 2^32).
  void normalize();

  /// The sum of the finite inputs, rounded to nearest, ties to even. +0 when empty.
  [[nodiscard]] double value() const;
  [[nodiscard]] std::int64_t nonfinite() const { return words_[kLimbs]; }

  /// For an all-reduce by integer sum; normalize() first, then up to 2^31 ranks can be added.
  [[nodiscard]] std::span<std::int64_t, kWords> words() { return words_; }
  [[nodiscard]] std::span<const std::int64_t, kWords> words() const { return words_; }

 private:
  std::array<std::int64_t, kWords> words_{};
};

}  // namespace tandem::kernels
