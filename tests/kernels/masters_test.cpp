// M1 and M2 of kernels/masters.h; M3 is tested with the update.
#include "kernels/masters.h"

#include "tests/kernels/values.h"

#include <gtest/gtest.h>

namespace tandem::kernels {
namespace {

/// Splits and joins `bits`; the master comes back bit for bit, the parameter is it rounded.
void expect_kept(const std::vector<std::uint32_t>& bits) {
  const auto numel = static_cast<std::int64_t>(bits.size());
  std::vector<float> master, back(bits.size(), 1.0F);
  for (const std::uint32_t own : bits) master.push_back(std::bit_cast<float>(own));
  std::vector<Bf16> param(bits.size());
  std::vector<std::uint16_t> remainder(bits.size());
  split_masters(master.data(), numel, param.data(), remainder.data());
  join_masters(param.data(), remainder.data(), numel, back.data());
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const bool is_nan = (bits[i] & 0x7FFFFFFFU) > 0x7F800000U;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]), is_nan ? 0x7FC00000U : bits[i])
        << std::hex << bits[i];
    ASSERT_EQ(param[i].bits, is_nan ? 0x7FC0U : (bits[i] + 0x8000U) >> 16) << std::hex << bits[i];
    ASSERT_EQ(remainder[i], is_nan ? 0U : bits[i] & 0xFFFFU) << std::hex << bits[i];
  }
}

// All bf16 values, zeros, denormals, infinities and NaNs among them, with what lies on both sides
// of them and of the ties between them.
TEST(Masters, SplitAndJoinedAreTheSameAtEveryBoundary) {
  std::vector<std::uint32_t> bits;
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      bits.push_back(upper << 16 | low);
    }
  }
  expect_kept(bits);
}

TEST(Masters, SplitAndJoinedAreTheSameForRandomBits) {
  std::mt19937 random(21);
  std::vector<std::uint32_t> bits(1'000'003);
  for (std::uint32_t& own : bits) own = static_cast<std::uint32_t>(random());
  expect_kept(bits);
}

// Whatever a program writes into a parameter, and whatever remainder is left from before: the
// master is finite where the parameter is, not more than half a unit away, and of the same sign.
TEST(Masters, AnyParameterWithAnyRemainderIsWithinHalfAUnit) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const Bf16 param{static_cast<std::uint16_t>(bits)};
    const float value = to_float(param);
    for (const std::uint32_t remainder : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      const float master = join_master(param, static_cast<std::uint16_t>(remainder));
      if (std::isnan(value)) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(master), 0x7FC00000U) << bits;
        continue;
      }
      ASSERT_EQ(std::signbit(master), std::signbit(value)) << bits << ", " << remainder;
      if (std::isinf(value)) {
        // A finite master that rounds to infinity is kept; all other remainders mean infinity.
        ASSERT_TRUE(remainder >= 0x8000U ? std::isfinite(master) : master == value);
        ASSERT_EQ(round_half_away(master).bits, bits);
        continue;
      }
      // Half of the distance to the next bf16 value away from zero (2^128 after the largest).
      const double next = (bits & 0x7FFFU) == 0x7F7FU
                              ? std::copysign(0x1p128, value)
                              : to_float(Bf16{static_cast<std::uint16_t>(bits + 1)});
      ASSERT_LE(std::fabs(static_cast<double>(master) - value), std::fabs(next - value) / 2)
          << std::hex << bits << ", " << remainder;
    }
  }
}

TEST(Masters, StartFromTheParameterOnlyWhereItDiffers) {
  // Below: 1 + 2^-8 is a tie in bf16 and rounds away; 1 + 2^-11 is one in fp16 and rounds to even.
  EXPECT_EQ(start_of(1.0F + 0x1p-8F, round_half_away(1.0F + 0x1p-7F)), 1.0F + 0x1p-8F);
  EXPECT_EQ(start_of(1.0F + 0x1p-8F, round_half_away(1.0F)), 1.0F);
  EXPECT_EQ(start_of(1.0F + 0x1p-11F, round_half_even(1.0F)), 1.0F + 0x1p-11F);
  EXPECT_EQ(start_of(1.0F + 0x1p-11F, round_half_even(1.0F + 0x1p-10F)), 1.0F + 0x1p-10F);
  // A zero's sign is an edit; the sign of a tiny master survives its rounding to zero.
  EXPECT_TRUE(std::signbit(start_of(0.0F, Bf16{0x8000})));
  EXPECT_EQ(start_of(-0x1p-140F, Bf16{0x8000}), -0x1p-140F);
}

}  // namespace
}  // namespace tandem::kernels
