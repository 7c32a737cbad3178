// kernels/fp16.h: IEEE 754 binary16 as its 16 bits, with the rounding of the numerics contract.
//
// H1 Integer selects and two exact float operations on normal numbers only: they vectorise at every
//    instruction-set level, need neither F16C nor libgcc, and give the same bits everywhere,
//    whatever the thread does with denormals (kernels/denormals.h).
#pragma once

#include "kernels/inline.h"

#include <cstdint>

namespace tandem::kernels {

struct Fp16 {
  std::uint16_t bits = 0;
};

/// Exact. NaN stays NaN with its sign and payload.
TANDEM_KERNEL_INLINE float to_float(Fp16 x) {
  constexpr std::int32_t kRebias = (127 - 15) << 23;
  constexpr std::int32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  const std::int32_t magnitude = x.bits & 0x7FFF;
  const std::int32_t wide = magnitude << 13;
  const std::int32_t normal = wide + (magnitude >= 0x7C00 ? 2 * kRebias : kRebias);
  // A denormal's fraction, put behind 2^-14 and relieved of it.
  const float denormal = __builtin_bit_cast(float, wide + kSmallestNormal) -
                         __builtin_bit_cast(float, kSmallestNormal);
  const std::int32_t bits =
      magnitude < 0x0400 ? __builtin_bit_cast(std::int32_t, denormal) : normal;
  const std::uint32_t sign = (x.bits & 0x8000U) << 16;
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) | sign);
}

/// Rounds to nearest, halves to even. Denormals are kept; from 65,520 on the result is infinite;
/// NaN stays NaN, with its sign.
TANDEM_KERNEL_INLINE Fp16 round_half_even(float x) {
  constexpr std::uint32_t kRebias = (127 - 15) << 23;
  constexpr std::int32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  constexpr std::int32_t kTooLarge = (127 + 16) << 23;        // 2^16
  constexpr std::int32_t kInfinity = 0x7F800000;
  const std::uint32_t given = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = given & 0x7FFFFFFFU;
  const auto size = static_cast<std::int32_t>(magnitude);  // signed: SSE2 compares nothing else
  // Half a unit less one, and the one where the last place is odd; a carry goes into the exponent.
  const std::uint32_t normal = (magnitude + ((magnitude >> 13) & 1U) + (0xFFFU - kRebias)) >> 13;
  // The unit of fp16's denormals, 2^-24, is the last place of fp32 at 0.5: the addition rounds.
  const float shifted = __builtin_bit_cast(float, magnitude) + 0.5F;
  const std::uint32_t denormal =
      __builtin_bit_cast(std::uint32_t, shifted) - __builtin_bit_cast(std::uint32_t, 0.5F);
  const std::uint32_t finite = size < kSmallestNormal ? denormal : normal;
  const std::uint32_t special = size > kInfinity ? 0x7E00U : 0x7C00U;
  const std::uint32_t bits = size >= kTooLarge ? special : finite;
  return Fp16{static_cast<std::uint16_t>(bits | ((given >> 16) & 0x8000U))};
}

}  // namespace tandem::kernels
