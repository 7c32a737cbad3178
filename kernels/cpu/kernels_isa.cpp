// kernels/cpu/kernels_isa.cpp: the CPU kernels, compiled once per instruction set with
// TANDEM_ISA_TABLE naming the table that this object defines.
//
// C1 Only the table leaves this object: everything else is in the anonymous namespace, and of the
//    standard library only pow() is called (a test looks for weak symbols).
// C2 Plain loops that the compiler vectorises; contraction off, so all levels give the same bits.
// C3 Loops go by chunks, before each of which the memory of a later one is asked for: the hardware
//    stops at every page, which costs 10 to 20 % with streams as short of arithmetic as these.
// Called through cpu_kernels().
#include "kernels/bf16.h"
#include "kernels/cpu_kernels.h"
#include "kernels/fp16.h"
#include "kernels/masters.h"
#include "kernels/norm.h"
#include "kernels/powers.h"

#include <type_traits>

// The arrays of an update are too many for checks of overlap; U1 and UpdateArrays say that there is
// none, and compilers do not take it from __restrict alone.
#if defined(__clang__)
#define TANDEM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TANDEM_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tandem::kernels {
namespace {

/// Elements of the accumulator that stay in the first cache while many slices are added.
constexpr std::int64_t kFoldBlock = 2048;
/// Slices of one type that are added in one loop.
constexpr int kFoldGroup = 4;

/// Elements between two requests for memory, and how far ahead the memory is asked for. Asking
/// beyond an array's end is harmless.
constexpr std::int64_t kChunk = 64;
constexpr std::int64_t kAhead = 512;
/// The norm's one stream can be asked for earlier, beyond the ends of its blocks.
constexpr std::int64_t kNormAhead = 4 * kNormBlock;

/// Asks for elements [kDistance, kDistance + kChunk) of p; kWrite: to be written.
template <bool kWrite, std::int64_t kDistance = kAhead, typename Element>
TANDEM_KERNEL_INLINE void prefetch_chunk(const Element* p) {
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(Element));
  for (std::int64_t i = 0; i < kChunk; i += kLine) __builtin_prefetch(p + kDistance + i, kWrite);
}

TANDEM_KERNEL_INLINE float value_of(float x) { return x; }
TANDEM_KERNEL_INLINE float value_of(Bf16 x) { return to_float(x); }
TANDEM_KERNEL_INLINE float value_of(Fp16 x) { return to_float(x); }

/// acc[i] = (fresh ? +0 : acc[i]) + group[0][i] + ... + group[kCount - 1][i].
template <typename Element, int kCount, bool kFresh>
void add_group(const Element* const* group, std::int64_t numel, float* __restrict acc) {
  const Element* __restrict s0 = group[0];
  const Element* __restrict s1 = group[kCount > 1 ? 1 : 0];
  const Element* __restrict s2 = group[kCount > 2 ? 2 : 0];
  const Element* __restrict s3 = group[kCount > 3 ? 3 : 0];
  const auto add = [=](std::int64_t i) {
    // The sum with +0 is no copy: it turns -0 into +0, which F3 relies on.
    float sum = (kFresh ? 0.0F : acc[i]) + value_of(s0[i]);
    if constexpr (kCount > 1) sum += value_of(s1[i]);
    if constexpr (kCount > 2) sum += value_of(s2[i]);
    if constexpr (kCount > 3) sum += value_of(s3[i]);
    acc[i] = sum;
  };
  std::int64_t begin = 0;
  for (; begin + kChunk <= numel; begin += kChunk) {
    prefetch_chunk<true>(acc + begin);
    prefetch_chunk<false>(s0 + begin);
    if constexpr (kCount > 1) prefetch_chunk<false>(s1 + begin);
    if constexpr (kCount > 2) prefetch_chunk<false>(s2 + begin);
    if constexpr (kCount > 3) prefetch_chunk<false>(s3 + begin);
    for (std::int64_t i = begin; i < begin + kChunk; ++i) add(i);
  }
  for (std::int64_t i = begin; i < numel; ++i) add(i);
}

template <typename Element, bool kFresh>
void add_group_of(
    const Slice* slices, int count, std::int64_t begin, std::int64_t numel, float* acc) {
  const Element* group[kFoldGroup] = {};
  for (int s = 0; s < count; ++s) group[s] = static_cast<const Element*>(slices[s].data) + begin;
  switch (count) {
    case 1:
      return add_group<Element, 1, kFresh>(group, numel, acc);
    case 2:
      return add_group<Element, 2, kFresh>(group, numel, acc);
    case 3:
      return add_group<Element, 3, kFresh>(group, numel, acc);
    default:
      return add_group<Element, 4, kFresh>(group, numel, acc);
  }
}

/// Adds count slices of one type, beginning at element `begin` of each, to acc[0, numel).
template <bool kFresh>
void add_slices(
    const Slice* slices, int count, std::int64_t begin, std::int64_t numel, float* acc) {
  switch (slices[0].dtype) {
    case Dtype::kBFloat16:
      return add_group_of<Bf16, kFresh>(slices, count, begin, numel, acc);
    case Dtype::kFloat16:
      return add_group_of<Fp16, kFresh>(slices, count, begin, numel, acc);
    case Dtype::kFloat32:
      break;
  }
  add_group_of<float, kFresh>(slices, count, begin, numel, acc);
}

void fold_slices(
    const Slice* slices, std::int64_t count, std::int64_t numel, float* acc, Accumulator state) {
  // All of the range at once while one group holds every slice: long streams prefetch best.
  const std::int64_t step = count <= kFoldGroup ? numel : kFoldBlock;
  for (std::int64_t begin = 0; begin < numel; begin += step) {
    const std::int64_t block = numel - begin < step ? numel - begin : step;
    bool fresh = state == Accumulator::kFresh;
    for (std::int64_t s = 0; s < count;) {
      if (slices[s].data == nullptr) {
        ++s;
        continue;
      }
      Slice group[kFoldGroup];
      int size = 0;
      const Dtype dtype = slices[s].dtype;
      for (; s < count && size < kFoldGroup; ++s) {
        if (slices[s].data == nullptr) continue;
        if (slices[s].dtype != dtype) break;
        group[size++] = slices[s];
      }
      if (fresh) {
        add_slices<true>(group, size, begin, block, acc + begin);
      } else {
        add_slices<false>(group, size, begin, block, acc + begin);
      }
      fresh = false;
    }
    if (fresh) __builtin_memset(acc + begin, 0, static_cast<std::size_t>(block) * sizeof(float));
  }
}

void multiply_range(float* x, float factor, std::int64_t numel) {
  TANDEM_INDEPENDENT
  for (std::int64_t i = 0; i < numel; ++i) x[i] *= factor;
}

double sum_of_squares_of_block(const float* x, std::int64_t numel) {
  double lanes[kNormLanes] = {};
  std::int64_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) {
    if (i % kChunk == 0) prefetch_chunk<false, kNormAhead>(x + i);
    for (int lane = 0; lane < kNormLanes; ++lane) {
      const double value = x[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i + lane < numel; ++lane) {
    const double value = x[i + lane];
    lanes[lane] += value * value;
  }
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

double sum_of_powers_of_block(const float* x, std::int64_t numel, const Power& given) {
  const Power power = given;
  double lanes[kNormLanes] = {};
  for (std::int64_t i = 0; i < numel; ++i) lanes[i % kNormLanes] += term_of(x[i], power);
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return on_grid(lanes[0]);
}

std::uint32_t largest_magnitude_of(const float* x, std::int64_t numel) {
  std::int32_t largest = 0;  // signed: every instruction set compares those
  for (std::int64_t i = 0; i < numel; ++i) {
    const std::int32_t bits = __builtin_bit_cast(std::int32_t, x[i]) & 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  return static_cast<std::uint32_t>(largest);
}

/// How a parameter is stored: as it is, or as Half with separate masters or with remainders.
struct Plain {};
template <typename Half>
struct WithMasters {};
struct WithRemainders {};

template <typename Storage>
struct ParamOf {
  using Type = Bf16;
};
template <>
struct ParamOf<Plain> {
  using Type = float;
};
template <typename Half>
struct ParamOf<WithMasters<Half>> {
  using Type = Half;
};

template <typename Functor, typename Storage>
void run_update(const Functor& given, const UpdateArrays& arrays) {
  using Param = typename ParamOf<Storage>::Type;
  constexpr bool kPlain = std::is_same_v<Storage, Plain>;
  constexpr bool kRemainders = std::is_same_v<Storage, WithRemainders>;
  constexpr bool kMasters = !kPlain && !kRemainders;
  constexpr int kStates = Functor::kStates;
  const Functor functor = given;  // a copy: no store below can be thought to change its scalars
  const float* __restrict grad = arrays.grad;
  Param* __restrict param = static_cast<Param*>(arrays.param);
  float* __restrict master = arrays.master;
  std::uint16_t* __restrict remainder = arrays.remainder;
  float* __restrict state0 = arrays.state[0];
  float* __restrict state1 = arrays.state[1];
  float* __restrict state2 = arrays.state[2];
  const auto step = [=](std::int64_t i) {
    float state[kStates > 0 ? kStates : 1] = {};
    if constexpr (kStates > 0) state[0] = state0[i];
    if constexpr (kStates > 1) state[1] = state1[i];
    if constexpr (kStates > 2) state[2] = state2[i];
    float start = 0.0F;
    if constexpr (kPlain) start = param[i];
    if constexpr (kMasters) start = start_of(master[i], param[i]);
    if constexpr (kRemainders) start = join_master(param[i], remainder[i]);
    float updated = functor(start, grad[i], state);
    if constexpr (kPlain) {
      param[i] = updated;
    } else {
      updated = canonical(updated);
      if constexpr (kMasters) master[i] = updated;
      if constexpr (kRemainders) remainder[i] = remainder_of(updated);
      round_master(updated, param[i]);
    }
    if constexpr (kStates > 0) state0[i] = state[0];
    if constexpr (kStates > 1) state1[i] = state[1];
    if constexpr (kStates > 2) state2[i] = state[2];
  };
  std::int64_t begin = 0;
  for (; begin + kChunk <= arrays.numel; begin += kChunk) {
    prefetch_chunk<false>(grad + begin);
    prefetch_chunk<true>(param + begin);
    if constexpr (kMasters) prefetch_chunk<true>(master + begin);
    if constexpr (kRemainders) prefetch_chunk<true>(remainder + begin);
    if constexpr (kStates > 0) prefetch_chunk<true>(state0 + begin);
    if constexpr (kStates > 1) prefetch_chunk<true>(state1 + begin);
    if constexpr (kStates > 2) prefetch_chunk<true>(state2 + begin);
    TANDEM_INDEPENDENT
    for (std::int64_t i = begin; i < begin + kChunk; ++i) step(i);
  }
  TANDEM_INDEPENDENT
  for (std::int64_t i = begin; i < arrays.numel; ++i) step(i);
}

template <typename Functor>
void update_fragment(const void* functor, const UpdateArrays& arrays) {
  const Functor& given = *static_cast<const Functor*>(functor);
  if (arrays.remainder != nullptr) {
    run_update<Functor, WithRemainders>(given, arrays);
  } else if (arrays.param_dtype == Dtype::kBFloat16) {
    run_update<Functor, WithMasters<Bf16>>(given, arrays);
  } else if (arrays.param_dtype == Dtype::kFloat16) {
    run_update<Functor, WithMasters<Fp16>>(given, arrays);
  } else {
    run_update<Functor, Plain>(given, arrays);
  }
}

template <typename Variant>
struct Table;
template <typename... Functors>
struct Table<std::variant<Functors...>> {
  static constexpr CpuKernels kKernels = {fold_slices,
                                          multiply_range,
                                          sum_of_squares_of_block,
                                          sum_of_powers_of_block,
                                          largest_magnitude_of,
                                          {update_fragment<Functors>...}};
};

}  // namespace

extern const CpuKernels TANDEM_ISA_TABLE;
const CpuKernels TANDEM_ISA_TABLE = Table<Update>::kKernels;

}  // namespace tandem::kernels
