// N1 to N3 of kernels/norm.h, and the same bits on every instruction set.
#include "kernels/norm.h"

#include "kernels/cpu_kernels.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

namespace tandem::kernels {
namespace {

/// N2 as it is written.
double block_by_definition(const float* x, std::int64_t numel) {
  std::array<double, 32> lanes{};
  for (std::int64_t i = 0; i < numel; ++i) {
    lanes[static_cast<std::size_t>(i % 32)] += static_cast<double>(x[i]) * x[i];
  }
  for (const std::size_t half : {16, 8, 4, 2, 1}) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

TEST(Norm, EveryIsaGivesTheBitsOfTheDefinition) {
  for (std::int64_t numel = 0; numel <= kNormBlock; ++numel) {
    const std::vector<float> x =
        random_values(numel + 1, static_cast<std::uint32_t>(numel), &any_finite);
    const double expected = block_by_definition(x.data() + 1, numel);
    for (const Isa isa : available_isas()) {
      ASSERT_EQ(cpu_kernels(isa).block_sum_of_squares(x.data() + 1, numel), expected)
          << name_of(isa) << ", numel " << numel;
    }
  }
}

TEST(Norm, EveryIsaGivesTheSameWords) {
  const Isa best = current_isa();
  for (const std::int64_t numel : kLengths) {
    const std::vector<float> x = random_values(numel + 3, 4, &anything);
    Superaccumulator expected;
    for (std::int64_t begin = 0; begin < numel; begin += kNormBlock) {
      expected.add(block_by_definition(x.data() + 3 + begin, std::min(kNormBlock, numel - begin)));
    }
    for (const Isa isa : available_isas()) {
      select_isa(isa);
      Superaccumulator sum;
      add_sum_of_squares(x.data() + 3, numel, sum);
      EXPECT_TRUE(std::ranges::equal(sum.words(), expected.words())) << name_of(isa);
    }
  }
  select_isa(best);
}

TEST(Norm, SquaresOfTheExtremesStayFiniteAndExact) {
  // 1,024 squares of the smallest denormal: 2^10 * 2^-298; of the largest value: 2^10 (2 - 2^-23)^2
  // 2^254, where the square has 48 bits, so that all sums of equal lanes are exact.
  std::vector<float> x(1024, 0x1p-149F);
  EXPECT_EQ(block_sum_of_squares(x.data(), 1024), 0x1p-288);
  x.assign(1024, std::numeric_limits<float>::max());
  const double largest = std::numeric_limits<float>::max();
  EXPECT_EQ(block_sum_of_squares(x.data(), 1024), 1024 * largest * largest);
}

TEST(Norm, AnyNonFiniteElementIsCountedInItsBlock) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float bad : {infinity, -infinity, nan}) {
    for (const std::size_t place : {0U, 31U, 32U, 1000U, 1023U, 1024U, 2999U}) {
      for (const Isa isa : available_isas()) {
        std::vector<float> x(3000, 1.0F);
        x[place] = bad;
        const std::size_t block = place / 1024 * 1024;
        EXPECT_FALSE(std::isfinite(cpu_kernels(isa).block_sum_of_squares(
            x.data() + block,
            static_cast<std::int64_t>(std::min<std::size_t>(1024, 3000 - block)))));
        Superaccumulator sum;
        add_sum_of_squares(x.data(), 3000, sum);
        EXPECT_EQ(sum.nonfinite(), 1);
        // The other blocks are still there: 1,024 + 1,024 + 952 ones, without the bad block.
        EXPECT_EQ(sum.value(), block == 2048 ? 2048.0 : 1976.0);
      }
    }
  }
}

// N3
TEST(Norm, ShardsCutAtBlocksAddUpToTheSameWords) {
  const std::int64_t numel = 50'000;
  const std::vector<float> x = random_values(numel, 11, &any_finite);
  Superaccumulator whole;
  add_sum_of_squares(x.data(), numel, whole);
  whole.normalize();
  for (const int ranks : {2, 3, 4, 7}) {
    Superaccumulator joint;
    const std::int64_t blocks = (numel + kNormBlock - 1) / kNormBlock;
    for (int rank = ranks; rank-- > 0;) {
      const std::int64_t begin = blocks * rank / ranks * kNormBlock;
      const std::int64_t end = std::min(numel, blocks * (rank + 1) / ranks * kNormBlock);
      Superaccumulator own;
      add_sum_of_squares(x.data() + begin, end - begin, own);
      own.normalize();
      joint.merge(own);
    }
    joint.normalize();
    EXPECT_TRUE(std::ranges::equal(joint.words(), whole.words())) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace tandem::kernels
