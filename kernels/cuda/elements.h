// kernels/cuda/elements.h: groups of kVector elements, moved with one instruction where addresses
// allow.
//
// E1 A group is moved as one only if its array's start is a multiple of the group's size; every
// other
//    array is moved element by element. Both give the same values.
// Compiled for the GPU and, for tests, for the CPU. Called by the bodies of the kernels beside it.
#pragma once

#include "kernels/bf16.h"
#include "kernels/cuda/geometry.h"
#include "kernels/dtype.h"
#include "kernels/fp16.h"
#include "kernels/inline.h"

#include <cstdint>

#if defined(__CUDA_ARCH__)
#define TANDEM_UNROLL _Pragma("unroll")
#else
#define TANDEM_UNROLL
#endif

namespace tandem::kernels::cuda {

template <typename Element>
struct __attribute__((may_alias, aligned(kVector * sizeof(Element)))) Four {
  Element of[kVector];
};

/// Four elements of 16 bits.
struct __attribute__((may_alias, aligned(8))) WordPair {
  std::uint32_t of[2];
};

template <typename Element>
TANDEM_KERNEL_INLINE Four<Element> load_four(const Element* from) {
  return *reinterpret_cast<const Four<Element>*>(from);
}
template <typename Element>
TANDEM_KERNEL_INLINE void store_four(Element* to, const Four<Element>& four) {
  *reinterpret_cast<Four<Element>*>(to) = four;
}

/// Whether groups from `start` on may be moved as one (E1). Null may: it is never moved.
inline bool vector_start(const void* start, std::size_t element_bytes) {
  return reinterpret_cast<std::uintptr_t>(start) % (kVector * element_bytes) == 0;
}

/// A group of one of the three types as its bits, to be asked for before anything waits for it:
/// fp32 fills four words, 16 bits two.
struct RawFour {
  std::uint32_t words[kVector];
};

/// Elements [first, first + count) of `data`, count <= kVector; those beyond count are undefined.
TANDEM_KERNEL_INLINE RawFour
load_raw(const void* data, Dtype dtype, bool vector, std::int64_t first, int count) {
  RawFour raw{};
  if (dtype == Dtype::kFloat32) {
    const auto* from = static_cast<const std::uint32_t*>(data) + first;
    if (vector && count == kVector) {
      const Four<std::uint32_t> four = load_four(from);
      TANDEM_UNROLL
      for (int j = 0; j < kVector; ++j) raw.words[j] = four.of[j];
    } else {
      TANDEM_UNROLL
      for (int j = 0; j < kVector; ++j) {
        if (j < count) raw.words[j] = from[j];
      }
    }
    return raw;
  }
  const auto* from = static_cast<const std::uint16_t*>(data) + first;
  if (vector && count == kVector) {
    const WordPair pair = *reinterpret_cast<const WordPair*>(from);
    raw.words[0] = pair.of[0];
    raw.words[1] = pair.of[1];
  } else {
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) {
      if (j < count) {
        raw.words[j / 2] |= static_cast<std::uint32_t>(from[j]) << (16 * (j % 2));
      }
    }
  }
  return raw;
}

/// Element j of the group, exactly. Little-endian, as GPUs and x86 are.
TANDEM_KERNEL_INLINE float element_of(const RawFour& raw, Dtype dtype, int j) {
  if (dtype == Dtype::kFloat32) return __builtin_bit_cast(float, raw.words[j]);
  const auto bits = static_cast<std::uint16_t>(raw.words[j / 2] >> (16 * (j % 2)));
  return dtype == Dtype::kBFloat16 ? to_float(Bf16{bits}) : to_float(Fp16{bits});
}

/// to[first, first + count) = values.
TANDEM_KERNEL_INLINE void store_floats(
    float* to, bool vector, std::int64_t first, int count, const float* values) {
  if (vector && count == kVector) {
    Four<float> four;
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) four.of[j] = values[j];
    store_four(to + first, four);
  } else {
    TANDEM_UNROLL
    for (int j = 0; j < kVector; ++j) {
      if (j < count) to[first + j] = values[j];
    }
  }
}

/// How many elements of the group at `first` lie below `numel`: 0 to kVector.
TANDEM_KERNEL_INLINE int group_count(std::int64_t first, std::int64_t numel) {
  const std::int64_t rest = numel - first;
  return rest >= kVector ? kVector : rest > 0 ? static_cast<int>(rest) : 0;
}

/// Where group `g` of thread `thread` begins in a tile: the threads of a warp take neighbours.
TANDEM_KERNEL_INLINE std::int64_t first_of_group(std::int64_t tile, int thread, int g) {
  return tile * kTileNumel + (static_cast<std::int64_t>(g) * kThreads + thread) * kVector;
}

}  // namespace tandem::kernels::cuda
