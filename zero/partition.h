// zero/partition.h: which elements of a bucket a rank owns.
//
// P1 The slices of all ranks cover [0, numel) once, in rank order.
// P2 Slices begin at multiples of kBlock (1,024) elements, so that a norm block never straddles
// two. P3 A slice depends on (numel, group) only. Called by zero (shards) and engine.
#pragma once

#include "comm/group.h"

#include <cstdint>

namespace tandem::zero {

inline constexpr std::int64_t kBlock = 1024;

/// Half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  [[nodiscard]] std::int64_t numel() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

/// What `group.rank` owns of a bucket of `numel` elements (a multiple of kBlock). Blocks are dealt
/// as evenly as they go, the first ranks taking one more.
[[nodiscard]] Range slice_of(comm::Group group, std::int64_t numel);

}  // namespace tandem::zero
