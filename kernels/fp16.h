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
/// NaN stays NaN (made quiet).
TANDEM_KERNEL_INLINE Fp16 round_half_even(float x) {
  constexpr std::int32_t kRebias = (127 - 15) << 23;
  constexpr std::int32_t kSmallestNormal = (127 - 14) << 23;  // 2^-14
  constexpr std::int32_t kTooLarge = (127 + 16) << 23;        // 2^16
  constexpr std::int32_t kInfinity = 0x7F800000;
  const std::uint32_t given = __builtin_bit_cast(std::uint32_t, x);
  const auto magnitude = static_cast<std::int32_t>(given & 0x7FFFFFFFU);
  // The unit of fp16's denormals, 2^-24, is the last place of fp32 at 0.5: the addition rounds.
  const float denormal = __builtin_bit_cast(float, magnitude) + 0.5F;
  const std::int32_t even = (magnitude >> 13) & 1;
  // Of infinities and NaNs the sum is not used; a NaN's would overflow.
  const std::int32_t finite = magnitude < kInfinity ? magnitude : 0;
  const std::int32_t rounded = finite + 0xFFF + even;
  std::int32_t bits = (rounded - kRebias) >> 13;
  bits = rounded >= kTooLarge ? 0x7C00 : bits;
  bits = magnitude < kSmallestNormal
             ? __builtin_bit_cast(std::int32_t, denormal) - __builtin_bit_cast(std::int32_t, 0.5F)
             : bits;
  bits = magnitude >= kInfinity ? 0x7C00 : bits;
  bits = magnitude > kInfinity ? 0x7E00 | ((magnitude >> 13) & 0x3FF) : bits;
  return Fp16{
      static_cast<std::uint16_t>(static_cast<std::uint32_t>(bits) | ((given >> 16) & 0x8000U))};
}

}  // namespace tandem::kernels
