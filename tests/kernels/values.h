// tests/kernels/values.h: the inputs that every kernel is tried with, and how results are compared.
#pragma once

#include "kernels/bf16.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace tandem::kernels {

/// Lengths around the vector width, the block of the norm and a large odd one.
inline const std::vector<std::int64_t> kLengths = {0,  1,  3,    31,   32,   33,
                                                   63, 65, 1023, 1024, 1025, 100'003};

/// Any fp32 value: mostly of all magnitudes, each sign; denormals, zeros; no infinities, no NaNs.
inline float any_finite(std::mt19937& random) {
  switch (random() % 8) {
    case 0:
      return std::bit_cast<float>(static_cast<std::uint32_t>(random()) &
                                  0x807FFFFFU);  // denormals and zeros
    case 1:
      return random() % 2 == 0 ? 0.0F : -0.0F;
    case 2:
      return (random() % 2 == 0 ? 1.0F : -1.0F) * std::numeric_limits<float>::max();
    case 3:
    case 4: {  // of any magnitude
      const auto bits = static_cast<std::uint32_t>(random());
      return (bits & 0x7F800000U) == 0x7F800000U ? 1.0F : std::bit_cast<float>(bits);
    }
    default:
      return static_cast<float>(static_cast<double>(random()) / 4294967296.0 - 0.5);
  }
}

/// The same with infinities and NaNs among them.
inline float anything(std::mt19937& random) {
  switch (random() % 32) {
    case 0:
      return std::numeric_limits<float>::infinity();
    case 1:
      return -std::numeric_limits<float>::infinity();
    case 2:
      return std::numeric_limits<float>::quiet_NaN();
    default:
      return any_finite(random);
  }
}

inline std::vector<float> random_values(std::int64_t numel,
                                        std::uint32_t seed,
                                        float (*draw)(std::mt19937&)) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<std::size_t>(numel));
  for (float& value : values) value = draw(random);
  return values;
}

/// Where two arrays first differ in bits, or "" (NaNs are equal to each other: which payload an
/// addition of two NaNs keeps is the compiler's choice).
inline std::string first_difference(const float* a, const float* b, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::bit_cast<std::uint32_t>(a[i]) != std::bit_cast<std::uint32_t>(b[i])) {
      return "element " + std::to_string(i) + ": " + std::to_string(a[i]) +
             " != " + std::to_string(b[i]);
    }
  }
  return "";
}

}  // namespace tandem::kernels
