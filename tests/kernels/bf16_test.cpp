// The roundings of kernels/bf16.h.
#include "kernels/bf16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace tandem::kernels {
namespace {

TEST(Bf16, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const Bf16 value{static_cast<std::uint16_t>(bits)};
    const Bf16 back = round_half_away(to_float(value));
    if (std::isnan(to_float(value))) {
      ASSERT_TRUE(std::isnan(to_float(back))) << bits;
    } else {
      ASSERT_EQ(back.bits, value.bits);
    }
  }
}

// bf16 keeps 8 significant bits: above 1 the spacing is 2^-7.
TEST(Bf16, RoundsToNearestAndHalvesAwayFromZero) {
  const float half = 0x1p-8F;
  EXPECT_EQ(to_float(round_half_away(1.0F + half)), 1.0F + 2 * half);
  EXPECT_EQ(to_float(round_half_away(-1.0F - half)), -1.0F - 2 * half);
  EXPECT_EQ(to_float(round_half_away(1.0F + 3 * half)), 1.0F + 4 * half);
  EXPECT_EQ(to_float(round_half_away(std::nextafter(1.0F + half, 0.0F))), 1.0F);
  EXPECT_EQ(to_float(round_half_away(std::nextafter(-1.0F - half, 0.0F))), -1.0F);
}

TEST(Bf16, KeepsDenormalsInfinitiesAndNaNs) {
  // bf16's smallest denormal is 2^-133, fp32's smallest is 2^-149.
  EXPECT_EQ(to_float(round_half_away(0x1p-133F)), 0x1p-133F);
  EXPECT_EQ(to_float(round_half_away(0x1p-134F)), 0x1p-133F);
  EXPECT_EQ(to_float(round_half_away(0x1p-135F)), 0.0F);
  EXPECT_TRUE(std::signbit(to_float(round_half_away(-0.0F))));

  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(round_half_away(infinity)), infinity);
  EXPECT_EQ(to_float(round_half_away(-infinity)), -infinity);
  EXPECT_EQ(to_float(round_half_away(std::numeric_limits<float>::max())), infinity);
  // The payload's low half alone would vanish, or carry into the sign: 0x7FFFFFFF + 0x8000.
  for (const std::uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
    const Bf16 rounded = round_half_away(std::bit_cast<float>(bits));
    EXPECT_TRUE(std::isnan(to_float(rounded))) << std::hex << bits;
    EXPECT_EQ(rounded.bits >> 15, bits >> 31) << std::hex << bits;
  }
}

}  // namespace
}  // namespace tandem::kernels
