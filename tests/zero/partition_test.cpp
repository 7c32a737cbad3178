// test.zero.partition: P1, P2, P3.
#include "zero/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace tandem::zero {
namespace {

TEST(Partition, SlicesCoverTheBucketOnceInRankOrder) {  // P1, P2
  for (int size = 1; size <= 9; ++size) {
    for (std::int64_t blocks = 0; blocks <= 40; ++blocks) {
      std::int64_t next = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Range slice = slice_of({rank, size}, blocks * kBlock);
        EXPECT_EQ(slice.begin, next) << "rank " << rank << " of " << size;
        EXPECT_GE(slice.numel(), 0);
        EXPECT_EQ(slice.begin % kBlock, 0);
        next = slice.end;
      }
      EXPECT_EQ(next, blocks * kBlock) << size << " ranks, " << blocks << " blocks";
    }
  }
}

TEST(Partition, SlicesDifferByOneBlockAtMostAndTheFirstRanksHaveIt) {
  for (int size = 1; size <= 9; ++size) {
    for (std::int64_t blocks = 0; blocks <= 40; ++blocks) {
      std::int64_t before = slice_of({0, size}, blocks * kBlock).numel();
      EXPECT_EQ(before, (blocks + size - 1) / size * kBlock);
      for (int rank = 1; rank < size; ++rank) {
        const std::int64_t own = slice_of({rank, size}, blocks * kBlock).numel();
        EXPECT_LE(own, before);
        before = own;
      }
      EXPECT_EQ(before, blocks / size * kBlock);
    }
  }
}

TEST(Partition, FiveBlocksOnThreeRanks) {
  // 5 = 2 + 2 + 1.
  EXPECT_EQ(slice_of({0, 3}, 5 * kBlock), (Range{0, 2048}));
  EXPECT_EQ(slice_of({1, 3}, 5 * kBlock), (Range{2048, 4096}));
  EXPECT_EQ(slice_of({2, 3}, 5 * kBlock), (Range{4096, 5120}));
}

TEST(Partition, RanksBeyondTheBlocksOwnNothing) {
  EXPECT_EQ(slice_of({0, 4}, kBlock), (Range{0, kBlock}));
  EXPECT_EQ(slice_of({3, 4}, kBlock).numel(), 0);
}

TEST(Partition, BucketsBeyondThirtyTwoBits) {
  // 2^33 elements are 2^23 blocks: 2,796,203 on ranks 0 and 1, 2,796,202 on rank 2.
  const std::int64_t numel = std::int64_t{1} << 33;
  EXPECT_EQ(slice_of({1, 3}, numel), (Range{2796203 * kBlock, 2 * 2796203 * kBlock}));
  EXPECT_EQ(slice_of({2, 3}, numel), (Range{2 * 2796203 * kBlock, numel}));
}

}  // namespace
}  // namespace tandem::zero
