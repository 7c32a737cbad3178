// kernels/cuda/fold_body.h: what one thread does in a fold, a cast and a fill (kernels/fold.h, F1
// to F3).
//
// B1 The slices are added one after another in their order, to a sum kept in a register: the bits
// of the
//    CPU's loop, whatever the mix of types and alignments.
// Compiled for the GPU (fold.cu) and, for tests, for the CPU.
#pragma once

#include "kernels/cuda/elements.h"
#include "kernels/fold.h"
#include "kernels/inline.h"

#include <cstdint>
#include <span>
#include <utility>

namespace tandem::kernels::cuda {

/// Slices of one launch; a fold of more is several, of which all but the first continue. The struct
/// is a kernel's argument and must stay below 4 KB.
inline constexpr int kMaxSlices = 64;
/// Slices that a thread has asked for before it adds the first of them.
inline constexpr int kSlicesAtOnce = 4;

struct FoldSlice {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  bool vector = false;
};

struct FoldLaunch {
  FoldSlice slices[kMaxSlices];  // [count], none without data
  std::int32_t count = 0;
  bool fresh = false;
  bool acc_vector = false;
  std::int64_t numel = 0;
  float* acc = nullptr;
};

static_assert(sizeof(FoldLaunch) <= 4096, "a kernel takes arguments of 4 KB");

/// The launches of one fold, in order: give(FoldLaunch) for each. None where there is nothing to
/// add to a sum that goes on; one without slices clears a fresh one.
template <class Give>
void for_fold_launches(std::span<const Slice> slices,
                       std::int64_t numel,
                       float* acc,
                       Accumulator state,
                       const Give& give) {
  FoldLaunch launch;
  launch.fresh = state == Accumulator::kFresh;
  launch.numel = numel;
  launch.acc = acc;
  launch.acc_vector = vector_start(acc, sizeof(float));
  for (const Slice& slice : slices) {
    if (slice.data == nullptr) continue;  // F3
    if (launch.count == kMaxSlices) {
      give(std::as_const(launch));
      launch.count = 0;
      launch.fresh = false;
    }
    launch.slices[launch.count++] = {slice.data, slice.dtype,
                                     vector_start(slice.data, bytes_of(slice.dtype))};
  }
  if (launch.count > 0 || launch.fresh) give(std::as_const(launch));
}

/// A thread's groups of one slice, added to its sums. The type is asked once for all, not per
/// element: a fold of many slices would otherwise be bound by its selects.
template <Dtype kDtype>
TANDEM_KERNEL_INLINE void add_groups(const RawFour (&raw)[kGroupsOfThread],
                                     float (&sum)[kGroupsOfThread][kVector]) {
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) sum[g][j] += element_of(raw[g], kDtype, j);
  }
}

/// The groups of one thread in one tile. Everything is asked for before anything is added.
TANDEM_KERNEL_INLINE void fold_groups(const FoldLaunch& launch, std::int64_t tile, int thread) {
  float sum[kGroupsOfThread][kVector];
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    const int count = group_count(first, launch.numel);
    RawFour raw{};  // +0: a fresh sum
    if (!launch.fresh) raw = load_raw(launch.acc, Dtype::kFloat32, launch.acc_vector, first, count);
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) sum[g][j] = element_of(raw, Dtype::kFloat32, j);
  }
  for (int base = 0; base < launch.count; base += kSlicesAtOnce) {
    RawFour raw[kSlicesAtOnce][kGroupsOfThread] = {};
    TANDEM_UNROLL
    for (int k = 0; k < kSlicesAtOnce; ++k) {
      if (base + k < launch.count) {
        const FoldSlice& slice = launch.slices[base + k];
        TANDEM_UNROLL
        for (int g = 0; g < kGroupsOfThread; ++g) {
          const std::int64_t first = first_of_group(tile, thread, g);
          raw[k][g] = load_raw(slice.data, slice.dtype, slice.vector, first,
                               group_count(first, launch.numel));
        }
      }
    }
    TANDEM_UNROLL
    for (int k = 0; k < kSlicesAtOnce; ++k) {
      if (base + k < launch.count) {
        switch (launch.slices[base + k].dtype) {
          case Dtype::kFloat32:
            add_groups<Dtype::kFloat32>(raw[k], sum);
            break;
          case Dtype::kBFloat16:
            add_groups<Dtype::kBFloat16>(raw[k], sum);
            break;
          case Dtype::kFloat16:
            add_groups<Dtype::kFloat16>(raw[k], sum);
            break;
        }
      }
    }
  }
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    store_floats(launch.acc, launch.acc_vector, first, group_count(first, launch.numel), sum[g]);
  }
}

struct WidenLaunch {
  float* to = nullptr;
  const void* from = nullptr;
  Dtype dtype = Dtype::kBFloat16;
  bool to_vector = false;
  bool from_vector = false;
  std::int64_t numel = 0;
};

TANDEM_KERNEL_INLINE void widen_groups(const WidenLaunch& launch, std::int64_t tile, int thread) {
  RawFour raw[kGroupsOfThread];
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    raw[g] = load_raw(launch.from, launch.dtype, launch.from_vector, first,
                      group_count(first, launch.numel));
  }
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    float values[kVector];
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) values[j] = element_of(raw[g], launch.dtype, j);
    store_floats(launch.to, launch.to_vector, first, group_count(first, launch.numel), values);
  }
}

struct MultiplyLaunch {
  float* x = nullptr;
  float factor = 1.0F;
  bool vector = false;
  std::int64_t numel = 0;
};

TANDEM_KERNEL_INLINE void multiply_groups(const MultiplyLaunch& launch,
                                          std::int64_t tile,
                                          int thread) {
  RawFour raw[kGroupsOfThread];
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    raw[g] =
        load_raw(launch.x, Dtype::kFloat32, launch.vector, first, group_count(first, launch.numel));
  }
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    float values[kVector];
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) {
      values[j] = element_of(raw[g], Dtype::kFloat32, j) * launch.factor;
    }
    store_floats(launch.x, launch.vector, first, group_count(first, launch.numel), values);
  }
}

struct FillLaunch {
  float* to = nullptr;
  float value = 0.0F;
  bool vector = false;
  std::int64_t numel = 0;
};

TANDEM_KERNEL_INLINE void fill_groups(const FillLaunch& launch, std::int64_t tile, int thread) {
  const float values[kVector] = {launch.value, launch.value, launch.value, launch.value};
  TANDEM_UNROLL
  for (int g = 0; g < kGroupsOfThread; ++g) {
    const std::int64_t first = first_of_group(tile, thread, g);
    store_floats(launch.to, launch.vector, first, group_count(first, launch.numel), values);
  }
}

}  // namespace tandem::kernels::cuda
