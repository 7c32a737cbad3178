// zero/partition.cpp: deals the blocks of a bucket to ranks.
#include "zero/partition.h"

#include "kernels/check.h"

#include <algorithm>

namespace tandem::zero {

Range slice_of(comm::Group group, std::int64_t numel) {
  TANDEM_ASSERT(numel >= 0 && numel % kBlock == 0, "P2 a bucket is made of whole blocks");
  TANDEM_ASSERT(group.rank >= 0 && group.rank < group.size, "the rank is one of the group's");
  const std::int64_t blocks = numel / kBlock;
  const std::int64_t each = blocks / group.size;
  const std::int64_t one_more = blocks % group.size;  // ranks below this take each + 1
  const auto first_block = [&](std::int64_t rank) {
    return rank * each + std::min(rank, one_more);
  };
  return {first_block(group.rank) * kBlock, first_block(group.rank + 1) * kBlock};
}

}  // namespace tandem::zero
