// kernels/bf16.h: bfloat16 as its 16 bits, with the roundings of the numerics contract.
#pragma once

#include "kernels/inline.h"

#include <cstdint>

namespace tandem::kernels {

// The conversions use the builtin: std::bit_cast would be a function, and thereby a symbol, in
// unoptimised builds (inline.h).

struct Bf16 {
  std::uint16_t bits = 0;
};

TANDEM_KERNEL_INLINE float to_float(Bf16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16);
}

/// Rounds halves away from zero: (bits + 0x8000) >> 16. NaN stays NaN, infinity stays infinity,
/// denormals are kept. A finite value beyond the largest bf16 rounds to infinity.
TANDEM_KERNEL_INLINE Bf16 round_half_away(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  const std::uint32_t rounded = is_nan ? (bits | 0x00400000U) : bits + 0x8000U;
  return Bf16{static_cast<std::uint16_t>(rounded >> 16)};
}

}  // namespace tandem::kernels
