// The conversions of kernels/fp16.h, exhaustively, against the format's definition.
#include "kernels/fp16.h"

#include "kernels/fold.h"
#include "kernels/isa.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

namespace tandem::kernels {
namespace {

/// IEEE 754: sign, 5 bits of exponent with bias 15, 10 bits of fraction.
double by_definition(std::uint32_t bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 10 & 0x1FU);
  const double fraction = static_cast<double>(bits & 0x3FFU) / 1024.0;
  if (exponent == 31) {
    return fraction == 0.0 ? sign * std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, -14);
  return sign * std::ldexp(1.0 + fraction, exponent - 15);
}

/// x to the nearest multiple of the unit in the last place, halves to even.
double rounded_by_definition(float x) {
  if (std::isnan(x)) return x;
  if (std::fabs(x) >= 65520.0F) {  // halfway between the largest value, 65,504, and 2^16
    return std::copysign(std::numeric_limits<double>::infinity(), x);
  }
  const int exponent = x == 0.0F ? -14 : std::max(std::ilogb(x), -14);
  const double unit = std::ldexp(1.0, exponent - 10);
  return std::nearbyint(static_cast<double>(x) / unit) * unit;  // ties to even by default
}

void expect_rounded(float x) {
  const float own = to_float(round_half_even(x));
  const double expected = rounded_by_definition(x);
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(own));
  } else {
    ASSERT_EQ(own, expected) << std::hexfloat << x;
  }
  ASSERT_EQ(std::signbit(own), std::signbit(x)) << std::hexfloat << x;
}

TEST(Fp16, EveryValueIsExactAndSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const Fp16 value{static_cast<std::uint16_t>(bits)};
    const double expected = by_definition(bits);
    const Fp16 back = round_half_even(to_float(value));
    ASSERT_EQ(std::signbit(to_float(value)), bits >= 0x8000U);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(to_float(value))) << bits;
      ASSERT_EQ(back.bits, 0x7E00U | (bits & 0x8000U)) << bits;
    } else {
      ASSERT_EQ(to_float(value), expected) << bits;
      ASSERT_EQ(back.bits, bits);
    }
  }
}

// The midpoint of two neighbours has one bit more than they: an fp32 value. Beyond the largest
// value the neighbour is 2^16.
TEST(Fp16, RoundsRightAroundEveryValueAndEveryMidpoint) {
  for (std::uint32_t bits = 0; bits < 0x7C00U; ++bits) {
    const double value = by_definition(bits);
    const double next = bits == 0x7BFFU ? 65536.0 : by_definition(bits + 1);
    for (const double exact : {value, (value + next) / 2}) {
      const auto x = static_cast<float>(exact);
      ASSERT_EQ(x, exact);
      for (const float sign : {1.0F, -1.0F}) {
        expect_rounded(sign * x);
        expect_rounded(sign * std::nextafter(x, 1e30F));
        expect_rounded(sign * std::nextafter(x, -1e30F));
      }
    }
  }
}

TEST(Fp16, RoundsRandomBitsRight) {
  std::mt19937 random(3);
  for (int i = 0; i < 2'000'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(random());
    const float x = std::bit_cast<float>(bits);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(to_float(round_half_even(x)))) << bits;
    } else {
      expect_rounded(x);
    }
    // exponents around fp16's
    const std::uint32_t near = (bits & 0x807FFFFFU) | ((100 + random() % 48) << 23);
    expect_rounded(std::bit_cast<float>(near));
  }
}

TEST(Fp16, KeepsInfinitiesAndNaNs) {
  for (const std::uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
    const Fp16 rounded = round_half_even(std::bit_cast<float>(bits));
    EXPECT_TRUE(std::isnan(to_float(rounded))) << std::hex << bits;
    EXPECT_EQ(rounded.bits >> 15, bits >> 31) << std::hex << bits;
  }
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(round_half_even(infinity).bits, 0x7C00);
  EXPECT_EQ(round_half_even(-infinity).bits, 0xFC00);
  EXPECT_EQ(round_half_even(std::numeric_limits<float>::max()).bits, 0x7C00);
  EXPECT_EQ(round_half_even(65519.0F).bits, 0x7BFF);
  EXPECT_EQ(round_half_even(65520.0F).bits, 0x7C00);
}

// H1: the vectorised conversion, of all values. A fresh sum of one slice is the value (-0 becomes
// 0).
TEST(Fp16, EveryIsaConvertsEveryValueAlike) {
  std::vector<Fp16> all;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    all.push_back(Fp16{static_cast<std::uint16_t>(bits)});
  }
  const Slice slice{all.data(), Dtype::kFloat16};
  const Isa best = current_isa();
  for (const Isa isa : available_isas()) {
    select_isa(isa);
    std::vector<float> values(65536);
    fold({&slice, 1}, 65536, values.data(), Accumulator::kFresh);
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const double expected = by_definition(bits);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(values[bits])) << name_of(isa) << ", " << bits;
      } else {
        ASSERT_EQ(values[bits], expected) << name_of(isa) << ", " << bits;
      }
    }
  }
  select_isa(best);
}

}  // namespace
}  // namespace tandem::kernels
