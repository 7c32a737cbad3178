// S1 to S3 of kernels/superaccumulator.h against a sum that is kept bit by bit.
#include "kernels/superaccumulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace tandem::kernels {
namespace {

/// An exact sum of non-negative doubles, one bool a bit; bit i weighs 2^(i - 400).
class BitSum {
 public:
  void add(double x) {
    // Doubles below 2^-400 do not occur here.
    for (int i = kBits - 1; i >= 0 && x > 0; --i) {
      const double weight = std::ldexp(1.0, i - 400);
      if (x >= weight) {
        x -= weight;  // exact: it clears x's highest bit
        add_bit(i);
      }
    }
  }

  /// To nearest, ties to even: compares what is below the 53 highest bits with one half.
  [[nodiscard]] double value() const {
    int top = kBits - 1;
    while (top >= 0 && !bits_[index(top)]) --top;
    if (top < 0) return 0.0;
    double kept = 0.0;
    for (int i = top; i >= 0 && i > top - 53; --i) {
      if (bits_[index(i)]) kept += std::ldexp(1.0, i - 400);
    }
    const int half = top - 53;
    if (half < 0 || !bits_[index(half)]) return kept;
    bool more = false;
    for (int i = 0; i < half; ++i) more = more || bits_[index(i)];
    const bool odd = bits_[index(half + 1)];
    return more || odd ? kept + std::ldexp(1.0, half + 1 - 400) : kept;
  }

 private:
  static constexpr int kBits = 800;
  static std::size_t index(int i) { return static_cast<std::size_t>(i); }
  void add_bit(int i) {
    for (; bits_[index(i)]; ++i) bits_[index(i)] = false;
    bits_[index(i)] = true;
  }
  std::array<bool, kBits> bits_{};
};

double random_sum_of_squares(std::mt19937_64& random, int lowest, int highest) {
  const int exponent =
      lowest + static_cast<int>(random() % static_cast<std::uint64_t>(highest - lowest + 1));
  // 53 random bits, so that the lowest one weighs 2^(exponent - 52) at least.
  const double mantissa = std::ldexp(static_cast<double>((random() >> 11) | 1), -52);
  return std::ldexp(mantissa, exponent);
}

bool same_words(Superaccumulator a, Superaccumulator b) {
  a.normalize();
  b.normalize();
  return std::ranges::equal(a.words(), b.words());
}

TEST(Superaccumulator, EmptyIsZero) {
  const Superaccumulator sum;
  EXPECT_EQ(std::bit_cast<std::uint64_t>(sum.value()), 0U);
  EXPECT_EQ(sum.nonfinite(), 0);
}

TEST(Superaccumulator, OneValueComesBackUnchanged) {
  std::mt19937_64 random(1);
  for (int exponent = -268; exponent < 320; ++exponent) {
    const double x = random_sum_of_squares(random, exponent, exponent);
    if (x >= Superaccumulator::kBound) continue;
    Superaccumulator sum;
    sum.add(x);
    ASSERT_EQ(sum.value(), x) << "2^" << exponent;
  }
  // The ends: the smallest fp32 square, the lowest bit of all, the largest value.
  for (const double x :
       {0x1p-298, 0x1p-320, std::nextafter(Superaccumulator::kBound, 0.0), 0.0, -0.0}) {
    Superaccumulator sum;
    sum.add(x);
    EXPECT_EQ(sum.value(), x);
    EXPECT_FALSE(std::signbit(sum.value()));
  }
}

// S2
TEST(Superaccumulator, SumsAreCorrectlyRounded) {
  std::mt19937_64 random(2);
  const std::vector<std::pair<int, int>> ranges = {{-246, 300}, {-246, -200}, {-60, 60},
                                                   {0, 5},      {250, 310},   {-30, -30}};
  for (int trial = 0; trial < 600; ++trial) {
    const auto [lowest, highest] = ranges[static_cast<std::size_t>(trial) % ranges.size()];
    Superaccumulator sum;
    BitSum oracle;
    const int count = 1 + static_cast<int>(random() % 40);
    for (int k = 0; k < count; ++k) {
      const double x = random_sum_of_squares(random, lowest, highest);
      sum.add(x);
      oracle.add(x);
      ASSERT_EQ(sum.value(), oracle.value()) << "trial " << trial << ", value " << k;
    }
  }
}

// Above 2^53 the spacing of doubles is 2.
TEST(Superaccumulator, TiesGoToEven) {
  const auto sum_of = [](std::vector<double> values) {
    Superaccumulator sum;
    for (const double value : values) sum.add(value);
    return sum.value();
  };
  EXPECT_EQ(sum_of({0x1p53, 1.0}), 0x1p53);
  EXPECT_EQ(sum_of({0x1p53, 3.0}), 0x1p53 + 4);
  EXPECT_EQ(sum_of({0x1p53, 1.0, 0x1p-298}), 0x1p53 + 2);
  EXPECT_EQ(sum_of({0x1p53, 3.0, 0x1p-320}), 0x1p53 + 4);
  EXPECT_EQ(sum_of({0x1p53, 0.5, 0x1p-298}), 0x1p53);
  // All 53 bits set and a tie above: the carry runs through the whole mantissa.
  EXPECT_EQ(sum_of({0x1p54 - 2, 1.0}), 0x1p54);
  // The same at every place of a digit's boundary.
  for (int shift = -200; shift < 200; ++shift) {
    const double one = std::ldexp(1.0, shift);
    EXPECT_EQ(sum_of({0x1p53 * one, one}), 0x1p53 * one) << shift;
    EXPECT_EQ(sum_of({0x1p53 * one, 3 * one}), 0x1p53 * one + 4 * one) << shift;
    EXPECT_EQ(sum_of({0x1p53 * one, one, 0x1p-320}), 0x1p53 * one + 2 * one) << shift;
  }
}

// S1
TEST(Superaccumulator, OrderAndSplitDoNotMatter) {
  std::mt19937_64 random(3);
  std::vector<double> values(500);
  for (double& value : values) value = random_sum_of_squares(random, -246, 300);
  Superaccumulator whole;
  for (const double value : values) whole.add(value);
  for (int trial = 0; trial < 20; ++trial) {
    std::shuffle(values.begin(), values.end(), random);
    std::array<Superaccumulator, 5> ranks;
    for (std::size_t k = 0; k < values.size(); ++k) {
      Superaccumulator& rank = ranks[random() % ranks.size()];
      rank.add(values[k]);
      if (k % 7 == 0) rank.normalize();  // carries in between change nothing
    }
    Superaccumulator joint;
    for (Superaccumulator& rank : ranks) {
      if (trial % 2 == 0) rank.normalize();
      joint.merge(rank);
    }
    ASSERT_TRUE(same_words(joint, whole));
    ASSERT_EQ(joint.value(), whole.value());
  }
}

TEST(Superaccumulator, NormalizedDigitsAreSmallAndTheValueStays) {
  std::mt19937_64 random(4);
  Superaccumulator sum;
  for (int k = 0; k < 10'000; ++k) sum.add(random_sum_of_squares(random, -246, 300));
  const double before = sum.value();
  sum.normalize();
  for (std::size_t k = 0; k + 1 < Superaccumulator::kLimbs; ++k) {
    EXPECT_GE(sum.words()[k], 0);
    EXPECT_LT(sum.words()[k], std::int64_t{1} << 32);
  }
  EXPECT_EQ(sum.value(), before);
}

// Merging a sum with itself 31 times counts as 2^31 adds: the promised limit. The worst values fill
// a digit: all mantissa bits set, at each of the 32 places.
TEST(Superaccumulator, HoldsTwoToThe31ValuesWithoutCarries) {
  for (int place = 0; place < 64; ++place) {
    for (const int exponent : {-250 + place, place, 319 - place}) {
      const double x = std::ldexp(2.0 - 0x1p-52, exponent);
      Superaccumulator sum;
      sum.add(x);
      for (int doubling = 0; doubling < 31; ++doubling) {
        Superaccumulator copy = sum;
        sum.merge(copy);
      }
      ASSERT_EQ(sum.value(), std::ldexp(x, 31)) << exponent;
      for (const std::int64_t word : sum.words()) ASSERT_GE(word, 0);
      sum.normalize();
      ASSERT_EQ(sum.value(), std::ldexp(x, 31)) << exponent;
    }
  }
}

// S3
TEST(Superaccumulator, CountsWhatIsNotFiniteOrOutOfRange) {
  Superaccumulator sum;
  sum.add(1.0);
  sum.add(std::numeric_limits<double>::infinity());
  sum.add(std::numeric_limits<double>::quiet_NaN());
  sum.add(Superaccumulator::kBound);
  sum.add(std::numeric_limits<double>::max());
  sum.add(2.0);
  EXPECT_EQ(sum.nonfinite(), 4);
  EXPECT_EQ(sum.value(), 3.0);
  Superaccumulator other;
  other.add(std::numeric_limits<double>::infinity());
  sum.merge(other);
  sum.normalize();
  EXPECT_EQ(sum.nonfinite(), 5);
  EXPECT_EQ(sum.value(), 3.0);
}

}  // namespace
}  // namespace tandem::kernels
