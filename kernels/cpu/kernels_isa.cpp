// kernels/cpu/kernels_isa.cpp: the CPU kernels, compiled once per instruction set with
// TANDEM_ISA_TABLE naming the table that this object defines.
//
// C1 Only the table leaves this object: everything else is in the anonymous namespace, and no
//    function of the standard library is called (a test looks for weak symbols).
// C2 Plain loops that the compiler vectorises; contraction off, so all levels give the same bits.
// C3 Loops go by chunks, before each of which the memory of a later one is asked for: the hardware
//    stops at every page, which costs 10 to 20 % with streams as short of arithmetic as these.
// Called through cpu_kernels().
#include "kernels/bf16.h"
#include "kernels/cpu_kernels.h"
#include "kernels/norm.h"

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

/// Asks for elements [kAhead, kAhead + kChunk) of p; kWrite: to be written.
template <bool kWrite, typename Element>
TANDEM_KERNEL_INLINE void prefetch_chunk(const Element* p) {
  constexpr std::int64_t kLine = 64 / static_cast<std::int64_t>(sizeof(Element));
  for (std::int64_t i = 0; i < kChunk; i += kLine) __builtin_prefetch(p + kAhead + i, kWrite);
}

TANDEM_KERNEL_INLINE float value_of(float x) { return x; }
TANDEM_KERNEL_INLINE float value_of(Bf16 x) { return to_float(x); }

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
void add_slices(const Slice* slices,
                int count,
                std::int64_t begin,
                std::int64_t numel,
                float* acc,
                bool fresh) {
  if (slices[0].dtype == Dtype::kBFloat16) {
    if (fresh) return add_group_of<Bf16, true>(slices, count, begin, numel, acc);
    return add_group_of<Bf16, false>(slices, count, begin, numel, acc);
  }
  if (fresh) return add_group_of<float, true>(slices, count, begin, numel, acc);
  return add_group_of<float, false>(slices, count, begin, numel, acc);
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
      add_slices(group, size, begin, block, acc + begin, fresh);
      fresh = false;
    }
    if (fresh) __builtin_memset(acc + begin, 0, static_cast<std::size_t>(block) * sizeof(float));
  }
}

double sum_of_squares_of_block(const float* x, std::int64_t numel) {
  double lanes[kNormLanes] = {};
  std::int64_t i = 0;
  for (; i + kNormLanes <= numel; i += kNormLanes) {
    if (i % kChunk == 0) prefetch_chunk<false>(x + i);
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

/// kMaster: the value is the master, and the parameter receives it rounded to bf16.
template <typename Functor, bool kMaster>
void run_update(const Functor& given, const UpdateArrays& arrays) {
  const Functor functor = given;  // a copy: no store below can be thought to change its scalars
  const float* __restrict grad = arrays.grad;
  float* __restrict value = kMaster ? arrays.master : static_cast<float*>(arrays.param);
  Bf16* __restrict rounded = kMaster ? static_cast<Bf16*>(arrays.param) : nullptr;
  float* __restrict state0 = arrays.state0;
  float* __restrict state1 = arrays.state1;
  const auto step = [=](std::int64_t i) {
    float first = state0[i];
    float updated = 0.0F;
    if constexpr (Functor::kStates == 2) {
      float second = state1[i];
      updated = functor(value[i], grad[i], first, second);
      state1[i] = second;
    } else {
      updated = functor(value[i], grad[i], first);
    }
    state0[i] = first;
    value[i] = updated;
    if constexpr (kMaster) rounded[i] = round_half_away(updated);
  };
  std::int64_t begin = 0;
  for (; begin + kChunk <= arrays.numel; begin += kChunk) {
    prefetch_chunk<false>(grad + begin);
    prefetch_chunk<true>(value + begin);
    prefetch_chunk<true>(state0 + begin);
    if constexpr (Functor::kStates == 2) prefetch_chunk<true>(state1 + begin);
    if constexpr (kMaster) prefetch_chunk<true>(rounded + begin);
    for (std::int64_t i = begin; i < begin + kChunk; ++i) step(i);
  }
  for (std::int64_t i = begin; i < arrays.numel; ++i) step(i);
}

template <typename Functor>
void update_fragment(const Functor& functor, const UpdateArrays& arrays) {
  if (arrays.master != nullptr) {
    run_update<Functor, true>(functor, arrays);
  } else {
    run_update<Functor, false>(functor, arrays);
  }
}

}  // namespace

extern const CpuKernels TANDEM_ISA_TABLE;
const CpuKernels TANDEM_ISA_TABLE = {fold_slices, sum_of_squares_of_block,
                                     update_fragment<AdamWUpdate>, update_fragment<SgdUpdate>};

}  // namespace tandem::kernels
