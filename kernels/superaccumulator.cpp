// kernels/superaccumulator.cpp: the exact sum. Digit k (bits 32 k to 32 k + 31 of the fixed-point
// number) weighs 2^(32 k - 320).
#include "kernels/superaccumulator.h"

#include "kernels/check.h"

#include <bit>
#include <cmath>

namespace tandem::kernels {
namespace {

constexpr int kDigitBits = 32;
constexpr std::int64_t kDigitMask = 0xFFFFFFFF;
constexpr int kLowestExponent = -320;  // of the lowest bit of digit 0
constexpr int kMantissaBits = 53;

__extension__ typedef unsigned __int128 Wide;

int bit_width(Wide x) {
  int width = 0;
  for (; x != 0; x >>= 1) ++width;
  return width;
}

}  // namespace

void Superaccumulator::add(double x) {
  TANDEM_ASSERT(!(x < 0.0), "a superaccumulator takes no negative values");
  x = std::fabs(x);  // -0
  if (!std::isfinite(x) || x >= kBound) {
    words_[kLimbs] += 1;
    return;
  }
  // x = mantissa * 2^(position - 320). By bits: frexp and ldexp would cost as much as a block's
  // sum.
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  const auto biased = static_cast<int>(bits >> 52);
  std::uint64_t mantissa = bits & ((std::uint64_t{1} << 52) - 1);
  if (biased != 0) mantissa |= std::uint64_t{1} << 52;
  const int exponent = (biased != 0 ? biased : 1) - 1075;
  const int position = exponent - kLowestExponent;
  Wide digits = mantissa;
  int limb = 0;
  if (position >= 0) {
    limb = position / kDigitBits;
    digits <<= position % kDigitBits;
  } else {
    const int dropped = -position < 64 ? -position : 64;
    TANDEM_ASSERT((digits & ((Wide{1} << dropped) - 1)) == 0,
                  "S1 every value is a multiple of 2^-320");
    digits >>= dropped;
  }
  for (; digits != 0; digits >>= kDigitBits, ++limb) {
    words_[static_cast<std::size_t>(limb)] += static_cast<std::int64_t>(digits) & kDigitMask;
  }
}

void Superaccumulator::merge(const Superaccumulator& other) {
  for (std::size_t k = 0; k < words_.size(); ++k) words_[k] += other.words_[k];
}

void Superaccumulator::normalize() {
  for (std::size_t k = 0; k + 1 < kLimbs; ++k) {
    TANDEM_ASSERT(words_[k] >= 0, "at most 2^31 values between two carries");
    words_[k + 1] += words_[k] >> kDigitBits;
    words_[k] &= kDigitMask;
  }
  TANDEM_ASSERT(words_[kLimbs - 1] >= 0, "the sum stays below 2^351");
}

double Superaccumulator::value() const {
  Superaccumulator sum = *this;
  sum.normalize();
  // The top word may exceed a digit: cut it, so that all digits have 32 bits.
  std::array<std::uint64_t, kLimbs + 1> digits{};
  for (std::size_t k = 0; k < kLimbs; ++k) digits[k] = static_cast<std::uint64_t>(sum.words_[k]);
  digits[kLimbs] = digits[kLimbs - 1] >> kDigitBits;
  digits[kLimbs - 1] &= kDigitMask;

  int top = kLimbs;
  while (top > 0 && digits[static_cast<std::size_t>(top)] == 0) --top;
  // The three highest digits hold at least 65 bits unless they are all there are; what lies below
  // them can only break a tie.
  const int low = top < 2 ? 0 : top - 2;
  Wide head = 0;
  for (int k = top; k >= low; --k) {
    head = (head << kDigitBits) | digits[static_cast<std::size_t>(k)];
  }
  bool below = false;
  for (int k = 0; k < low; ++k) below = below || digits[static_cast<std::size_t>(k)] != 0;

  int shift = bit_width(head) - kMantissaBits;
  if (shift < 0) shift = 0;  // few digits: exact
  auto mantissa = static_cast<std::uint64_t>(head >> shift);
  if (shift > 0) {
    const Wide half = Wide{1} << (shift - 1);
    const Wide rest = head & ((Wide{1} << shift) - 1);
    const bool above_half = rest > half || (rest == half && below);
    const bool tie = rest == half && !below;
    if (above_half || (tie && (mantissa & 1) != 0)) ++mantissa;
  }
  // mantissa <= 2^53 is exact as a double, and the exponent is far from both ends of the range.
  return std::ldexp(static_cast<double>(mantissa), kLowestExponent + kDigitBits * low + shift);
}

}  // namespace tandem::kernels
