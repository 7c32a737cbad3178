// kernels/cpu_kernels.h: the table of CPU kernels that exists once per instruction set.
//
// C1 cpu/kernels_isa.cpp is compiled once per level; nothing but its table leaves the object, so
//    that no code for a newer machine is reached except through the table.
// C2 All tables give the same bits.
// Called by fold.cpp, norm.cpp, powers.cpp and update.cpp, which check their arguments, and by
// tests.
#pragma once

#include "kernels/fold.h"
#include "kernels/isa.h"
#include "kernels/powers.h"
#include "kernels/update.h"

#include <cstdint>
#include <variant>

namespace tandem::kernels {

struct CpuKernels {
  /// fold.h; slices[0, count).
  void (*fold)(
      const Slice* slices, std::int64_t count, std::int64_t numel, float* acc, Accumulator state);
  /// fold.h.
  void (*multiply)(float* x, float factor, std::int64_t numel);
  /// norm.h; numel <= kNormBlock.
  double (*block_sum_of_squares)(const float* x, std::int64_t numel);
  /// powers.h; numel <= kNormBlock.
  double (*block_sum_of_powers)(const float* x, std::int64_t numel, const Power& power);
  std::uint32_t (*largest_magnitude)(const float* x, std::int64_t numel);
  /// update.h. By Update::index(); `functor` points to that alternative.
  void (*update[std::variant_size_v<Update>])(const void* functor, const UpdateArrays& arrays);
};

/// The table of one of available_isas().
[[nodiscard]] const CpuKernels& cpu_kernels(Isa isa);
/// The table of current_isa().
[[nodiscard]] const CpuKernels& cpu_kernels();

}  // namespace tandem::kernels
