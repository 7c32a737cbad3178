// R1 to R3 of kernels/powers.h against a loop in long double, whose exponents hold |x|^100 of every
// float, and the same bits on every instruction set and for every cut.
#include "kernels/powers.h"

#include "kernels/cpu_kernels.h"
#include "kernels/norm.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace tandem::kernels {
namespace {

constexpr double kTypes[] = {0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 7.0, 64.0, 64.5, 65.0, 100.0};
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

Power power_for(const std::vector<float>& x, double p) {
  const auto numel = static_cast<std::int64_t>(x.size());
  return power_of(p, needs_largest(p) ? magnitude_of(largest_magnitude(x.data(), numel)) : 0.0);
}

double norm(const std::vector<float>& x, double p) {
  const Power power = power_for(x, p);
  Superaccumulator sum;
  add_sum_of_powers(x.data(), static_cast<std::int64_t>(x.size()), power, sum);
  EXPECT_EQ(sum.nonfinite(), 0);
  return norm_of(sum.value(), power);
}

double norm_in_long_double(const std::vector<float>& x, double p) {
  long double sum = 0.0L;
  for (const float value : x) {
    sum += std::pow(std::fabs(static_cast<long double>(value)), static_cast<long double>(p));
  }
  return static_cast<double>(std::pow(sum, 1.0L / static_cast<long double>(p)));
}

/// A term is off by some p units of 2^-53, their sum by as many as additions follow each other in a
/// lane and the tree; the root divides that by p and is off by ln(sum) / p, at most 150 / p, more.
void expect_norm(const std::vector<float>& x, double p, const std::string& what) {
  const double expected = norm_in_long_double(x, p);
  EXPECT_NEAR(norm(x, p), expected, expected * (4.0 + 200.0 / p) * 0x1p-53)
      << what << ", p " << p << ", numel " << x.size();
}

float ordinary(std::mt19937& random) {
  return static_cast<float>(static_cast<double>(random()) / 4294967296.0 - 0.5);
}
float denormal(std::mt19937& random) { return static_cast<float>(random() % 1000) * kSmallest; }

TEST(Powers, NormsOfEveryTypeFollowLongDouble) {
  for (const double p : kTypes) {
    for (const std::int64_t numel : kLengths) {
      const auto seed = static_cast<std::uint32_t>(numel);
      expect_norm(random_values(numel, seed, &ordinary), p, "ordinary");
      expect_norm(random_values(numel, seed, &any_finite), p, "of all magnitudes");
      expect_norm(random_values(numel, seed, &denormal), p, "denormals");
    }
  }
}

TEST(Powers, NeitherOverflowNorVanishAtTheExtremes) {
  for (const double p : {0.25, 0.5, 1.0, 2.5, 3.0, 64.0, 65.0, 100.0, 5000.0}) {
    for (const float extreme : {kLargest, kSmallest, -kLargest, 0x1.FFFFFEp-1F}) {
      const std::vector<float> x(3000, extreme);
      const double expected = std::fabs(extreme) * std::pow(3000.0, 1.0 / p);
      EXPECT_NEAR(norm(x, p), expected, expected * (4.0 + 200.0 / p) * 0x1p-53) << p;
    }
    // Beside the largest value the smallest one is nothing (p = 1: 2^-277 of it; p = 0.25: 2^-69).
    EXPECT_EQ(norm({kLargest, kSmallest}, p), norm({kLargest}, p)) << p;
    EXPECT_NEAR(norm({kLargest}, p) / kLargest, 1.0, 200.0 / p * 0x1p-53) << p;
    EXPECT_NEAR(norm({kSmallest}, p) / kSmallest, 1.0, 200.0 / p * 0x1p-53) << p;
    EXPECT_EQ(norm({0.0F, -0.0F}, p), 0.0) << p;
    EXPECT_EQ(norm({}, p), 0.0) << p;
  }
  // Beyond every power: the largest.
  EXPECT_EQ(norm({3.0F, -5.0F, 1.0F}, 1e300), 5.0);
}

TEST(Powers, OfWholeNumbersAreExact) {
  EXPECT_EQ(norm({3.0F, -4.0F}, 1.0), 7.0);
  EXPECT_EQ(norm({3.0F, -4.0F}, 2.0), 5.0);
  EXPECT_EQ(norm({3.0F, -4.0F, 5.0F}, 3.0), 6.0);  // 27 + 64 + 125 = 216
  EXPECT_EQ(norm({1.0F, -4.0F}, 0.5), 9.0);        // (1 + 2)^2
}

TEST(Powers, DivideByAPowerOfTwoAsLongAsThatDoes) {
  EXPECT_EQ(power_of(3.0, 5.0).divisor, 4.0);
  EXPECT_EQ(power_of(64.0, 4.0).divisor, 4.0);
  EXPECT_EQ(power_of(64.5, 5.0).divisor, 5.0);
  EXPECT_EQ(power_of(3.0, kSmallest).divisor, 0x1p-149);
  EXPECT_EQ(power_of(3.0, kLargest).divisor, 0x1p127);
  EXPECT_EQ(power_of(3.0, std::numeric_limits<double>::max()).divisor, 0x1p1023);
  for (const double none :
       {0.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(power_of(3.0, none).divisor, 1.0);
  }
  EXPECT_EQ(power_of(3.0, 0.0).multiply, 3);
  EXPECT_EQ(power_of(64.0, 0.0).multiply, 64);
  EXPECT_EQ(power_of(65.0, 0.0).multiply, 0);
  EXPECT_EQ(power_of(2.5, 0.0).multiply, 0);
  EXPECT_EQ(power_of(0.5, 0.0).multiply, 0);
}

TEST(Powers, OnlySomeTypesNeedTheLargest) {
  for (const double p : {0.5, 1.0, 2.0}) EXPECT_FALSE(needs_largest(p)) << p;
  for (const double p : {1.5, 2.5, 3.0, 100.0, HUGE_VAL}) EXPECT_TRUE(needs_largest(p)) << p;
}

// R2
TEST(Powers, BlocksAreRoundedToTheGrid) {
  constexpr double kUnit = 0x1p-320;
  EXPECT_EQ(on_grid(0.0), 0.0);
  EXPECT_EQ(on_grid(0.49 * kUnit), 0.0);
  EXPECT_EQ(on_grid(0.51 * kUnit), kUnit);
  EXPECT_EQ(on_grid(1.51 * kUnit), 2.0 * kUnit);
  EXPECT_EQ(on_grid(0x1p-1074), 0.0);
  EXPECT_EQ(on_grid(0x1.FFFFFFFFFFFFFp-269), 0x1p-268);  // half a unit above the last multiple
  for (const double kept : {0x1p-268, 0x1.0000000000001p-268, 0x1p-269, 1.0, 1024.0, HUGE_VAL}) {
    EXPECT_EQ(on_grid(kept), kept);
  }
  EXPECT_TRUE(std::isnan(on_grid(std::numeric_limits<double>::quiet_NaN())));
}

/// N2 as it is written.
double block_by_definition(const float* x, std::int64_t numel, const Power& power) {
  std::array<double, 32> lanes{};
  for (std::int64_t i = 0; i < numel; ++i) {
    lanes[static_cast<std::size_t>(i % 32)] += term_of(x[i], power);
  }
  for (const std::size_t half : {16, 8, 4, 2, 1}) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return on_grid(lanes[0]);
}

TEST(Powers, EveryIsaGivesTheBitsOfTheDefinition) {
  for (const double p : {0.5, 1.0, 3.0, 7.0, 65.0}) {
    for (const std::int64_t numel : {0, 1, 31, 32, 33, 500, 1023, 1024}) {
      const std::vector<float> x = random_values(numel + 1, 5, &any_finite);
      const Power power = power_for(x, p);
      const double expected = block_by_definition(x.data() + 1, numel, power);
      for (const Isa isa : available_isas()) {
        ASSERT_EQ(cpu_kernels(isa).block_sum_of_powers(x.data() + 1, numel, power), expected)
            << name_of(isa) << ", p " << p << ", numel " << numel;
      }
    }
  }
}

// N3
TEST(Powers, ShardsCutAtBlocksAddUpToTheSameWords) {
  const std::int64_t numel = 20'000;
  const std::vector<float> x = random_values(numel, 11, &any_finite);
  for (const double p : {0.5, 1.0, 2.5, 3.0, 100.0}) {
    const Power power = power_for(x, p);
    Superaccumulator whole;
    add_sum_of_powers(x.data(), numel, power, whole);
    whole.normalize();
    for (const int ranks : {2, 3, 4, 7}) {
      Superaccumulator joint;
      const std::int64_t blocks = (numel + kNormBlock - 1) / kNormBlock;
      for (int rank = ranks; rank-- > 0;) {
        const std::int64_t begin = blocks * rank / ranks * kNormBlock;
        const std::int64_t end = std::min(numel, blocks * (rank + 1) / ranks * kNormBlock);
        Superaccumulator own;
        add_sum_of_powers(x.data() + begin, end - begin, power, own);
        own.normalize();
        joint.merge(own);
      }
      joint.normalize();
      EXPECT_TRUE(std::ranges::equal(joint.words(), whole.words())) << p << ", " << ranks;
    }
  }
}

TEST(Powers, AnyNonFiniteElementIsCountedInItsBlock) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const double p : {0.5, 1.0, 3.0, 65.0}) {
    for (const float bad : {infinity, -infinity, nan}) {
      for (const std::size_t place : {0U, 32U, 1023U, 1024U, 2999U}) {
        std::vector<float> x(3000, 1.0F);
        x[place] = bad;
        Superaccumulator sum;
        add_sum_of_powers(x.data(), 3000, power_for(x, p), sum);
        EXPECT_EQ(sum.nonfinite(), 1) << p;
        EXPECT_EQ(sum.value(), place >= 2048 ? 2048.0 : 1976.0) << p;
      }
    }
  }
}

TEST(Largest, IsFoundAtEveryPlaceOnEveryIsa) {
  for (const Isa isa : available_isas()) {
    const auto find = cpu_kernels(isa).largest_magnitude;
    EXPECT_EQ(find(nullptr, 0), 0U);
    for (std::int64_t numel = 1; numel <= 140; ++numel) {
      std::vector<float> x = random_values(numel, 3, &ordinary);
      for (float& one : x) {
        const float before = std::exchange(one, -7.0F);
        ASSERT_EQ(magnitude_of(find(x.data(), numel)), 7.0) << name_of(isa);
        one = before;
      }
    }
  }
}

TEST(Largest, OrdersZeroDenormalsInfinityAndNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = -std::numeric_limits<float>::quiet_NaN();
  const auto largest = [](const std::vector<float>& x) {
    return magnitude_of(largest_magnitude(x.data(), static_cast<std::int64_t>(x.size())));
  };
  EXPECT_EQ(largest({-0.0F, 0.0F}), 0.0);
  EXPECT_EQ(largest({-kSmallest, 0.0F}), kSmallest);
  EXPECT_EQ(largest({1.0F, -kLargest}), kLargest);
  EXPECT_EQ(largest({1.0F, -infinity, kLargest}), infinity);
  EXPECT_TRUE(std::isnan(largest({infinity, nan, 1.0F})));
}

}  // namespace
}  // namespace tandem::kernels
