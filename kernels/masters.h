// kernels/masters.h: fp32 master weights of 16-bit parameters, separate or as a remainder.
//
// A parameter is its master rounded (bf16: halves away from zero, fp16: halves to even). Separate
// masters are fp32 arrays. bf16 may keep the low half of the master's bits instead, its remainder:
// 2 bytes an element instead of 4. Since bf16 = (bits + 0x8000) >> 16, the upper half is the
// parameter, less one where the remainder is 0x8000 or more.
//
// M1 The two modes convert into each other bit for bit, and an update gives the same bits in both.
// M2 Infinities are kept. A NaN master is always kCanonicalNan: a NaN has no low half to keep.
// M3 The parameter wins: programs edit parameters in place. With separate masters an edit shows as
//    a parameter that differs from its rounded master, and the next update starts from the
//    parameter. With remainders the parameter is the upper half: the update starts within half a
//    unit in the parameter's last place of what was written, whatever the remainder was (exactly
//    from a zero that its remainder would take below zero).
// Called by the update kernels and by zero/optimizer_shard.
#pragma once

#include "kernels/bf16.h"
#include "kernels/fp16.h"
#include "kernels/inline.h"

#include <cstdint>

namespace tandem::kernels {

inline constexpr std::uint32_t kCanonicalNan = 0x7FC00000U;

/// A master as it is stored (M2).
TANDEM_KERNEL_INLINE float canonical(float master) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, master);
  return __builtin_bit_cast(float, (bits & 0x7FFFFFFFU) > 0x7F800000U ? kCanonicalNan : bits);
}

/// The parameter of a master.
TANDEM_KERNEL_INLINE void round_master(float master, Bf16& param) {
  param = round_half_away(master);
}
TANDEM_KERNEL_INLINE void round_master(float master, Fp16& param) {
  param = round_half_even(master);
}

/// Where an update starts (M3): the master, or the parameter where it is not the master rounded.
template <typename Half>
TANDEM_KERNEL_INLINE float start_of(float master, Half param) {
  Half rounded;
  round_master(master, rounded);
  return rounded.bits == param.bits ? master : to_float(param);
}

/// The low half of a canonical master.
TANDEM_KERNEL_INLINE std::uint16_t remainder_of(float master) {
  return static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, master));
}

/// The master of a parameter and its remainder. No split leaves a remainder of 0x8000 or more with
/// a zero, one of 1 to 0x7FFF with an infinity, or any but 0 with a NaN: there the parameter was
/// edited, and the remainder is dropped.
TANDEM_KERNEL_INLINE float join_master(Bf16 param, std::uint16_t remainder) {
  const std::uint32_t magnitude = param.bits & 0x7FFFU;
  const std::uint32_t upper = static_cast<std::uint32_t>(param.bits) << 16;
  const std::uint32_t low = remainder;
  // Less one of the upper half where rounding incremented it: the carry of low + 0x8000.
  const std::uint32_t joined = upper + low - ((low + 0x8000U) & 0x10000U);
  // Infinity and its remainder would be a NaN, a zero less one would wrap around.
  const std::uint32_t not_zero = magnitude == 0 && low >= 0x8000U ? upper : joined;
  const std::uint32_t bits = magnitude == 0x7F80U && low < 0x8000U ? upper : not_zero;
  return __builtin_bit_cast(float, magnitude > 0x7F80U ? kCanonicalNan : bits);
}

/// param[i] = master[i] rounded, remainder[i] = its low half, i in [0, numel). Moves 8 bytes an
/// element.
void split_masters(const float* master, std::int64_t numel, Bf16* param, std::uint16_t* remainder);
/// master[i] of param[i] and remainder[i]: what split_masters() was given, NaN made canonical.
void join_masters(const Bf16* param,
                  const std::uint16_t* remainder,
                  std::int64_t numel,
                  float* master);

}  // namespace tandem::kernels
