// P1 and P2 of kernels/cuda/geometry.h: how work is cut, with more than 2^31 elements in a bucket
// and 2^32 + 1 in one parameter. Arrays of that size are address space here, of which only the
// pages at the ends are ever touched.
#include "kernels/cuda/fold_body.h"
#include "kernels/cuda/geometry.h"
#include "kernels/cuda/norm_body.h"
#include "kernels/cuda/update_body.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <sys/mman.h>

namespace tandem::kernels::cuda {
namespace {

constexpr std::int64_t kTwo31 = std::int64_t{1} << 31;
constexpr std::int64_t kHuge = 2 * kTwo31 + 1;

TEST(CudaGeometry, PiecesHoldEveryElementOnce) {
  const std::vector<std::int64_t> numels = {0, 1, 1023, 2047, 2048, 2049, 0, 10'000, 5};
  const std::vector<Piece> pieces = all_pieces(numels);
  std::size_t p = 0;
  for (std::size_t f = 0; f < numels.size(); ++f) {
    std::int64_t next = 0;
    for (; p < pieces.size() && pieces[p].fragment == static_cast<std::int32_t>(f); ++p) {
      EXPECT_EQ(pieces[p].begin, next);
      EXPECT_EQ(pieces[p].begin % kNormBlock, 0);
      EXPECT_GT(pieces[p].numel, 0);
      EXPECT_LE(pieces[p].numel, kPieceNumel);
      next += pieces[p].numel;
    }
    EXPECT_EQ(next, numels[f]) << "fragment " << f;
  }
  EXPECT_EQ(p, pieces.size());
}

TEST(CudaGeometry, BucketsEndBehindTheirLastPiece) {
  // 1 + 2 pieces; none; 5 and, of nothing, none.
  const std::vector<std::int64_t> numels = {7, 2049, 10'000, 0};
  const std::vector<std::size_t> ends = {2, 2, 4};
  EXPECT_EQ(piece_ends(numels, ends), (std::vector<std::int64_t>{3, 3, 8}));
  EXPECT_EQ(all_pieces(numels).size(), 8U);
}

TEST(CudaGeometry, CutsAParameterBeyond32Bits) {
  // 2^32 + 1 = 2^21 pieces of 2^11 elements, and one element.
  EXPECT_EQ(piece_count(kHuge), (std::int64_t{1} << 21) + 1);
  const std::vector<std::int64_t> numels = {kHuge};
  const std::vector<Piece> pieces = all_pieces(numels);
  ASSERT_EQ(pieces.size(), (std::size_t{1} << 21) + 1);
  EXPECT_EQ(pieces.back().begin, 2 * kTwo31);
  EXPECT_EQ(pieces.back().numel, 1);
  EXPECT_EQ(pieces[pieces.size() - 2].begin, 2 * kTwo31 - kPieceNumel);
  EXPECT_EQ(pieces[pieces.size() - 2].numel, kPieceNumel);
}

TEST(CudaGeometry, CutsABucketBeyond31Bits) {
  // Three parameters of 2^30 elements in one bucket, one of 5 in the next.
  const std::vector<std::int64_t> numels = {kTwo31 / 2, kTwo31 / 2, kTwo31 / 2, 5};
  const std::vector<std::size_t> ends = {3, 4};
  EXPECT_EQ(piece_ends(numels, ends), (std::vector<std::int64_t>{3 << 19, (3 << 19) + 1}));
}

TEST(CudaGeometry, ManyTinyFragmentsShareBlocks) {
  const std::vector<std::int64_t> numels(10'000, 16);
  const std::vector<std::size_t> ends = {numels.size()};
  EXPECT_EQ(blocks_for(piece_ends(numels, ends)[0], kWarps), 1250);  // 8 warps a block
}

TEST(CudaGeometry, GridsAreWithinWhatALaunchTakes) {
  EXPECT_EQ(blocks_for(0, kWarps), 1);
  EXPECT_EQ(blocks_for(1, kTileNumel), 1);
  EXPECT_EQ(blocks_for(kTileNumel, kTileNumel), 1);
  EXPECT_EQ(blocks_for(kTileNumel + 1, kTileNumel), 2);
  EXPECT_EQ(blocks_for(kHuge, kTileNumel), (std::int64_t{1} << 21) + 1);
  EXPECT_EQ(blocks_for(INT64_MAX, kWarps), kMaxBlocks);
  EXPECT_EQ(divided_up(INT64_MAX, 2), (std::int64_t{1} << 62));
}

TEST(CudaGeometry, GroupsOfATileHoldEveryElementOnce) {
  std::vector<int> seen(static_cast<std::size_t>(2 * kTileNumel), 0);
  const std::int64_t numel = kTileNumel + 7;
  for (std::int64_t tile = 0; tile < 2; ++tile) {
    for (int thread = 0; thread < kThreads; ++thread) {
      for (int g = 0; g < kGroupsOfThread; ++g) {
        const std::int64_t first = first_of_group(tile, thread, g);
        EXPECT_EQ(first % kVector, 0);
        for (int j = 0; j < group_count(first, numel); ++j) {
          ++seen[static_cast<std::size_t>(first + j)];
        }
      }
    }
  }
  for (std::int64_t i = 0; i < 2 * kTileNumel; ++i) {
    ASSERT_EQ(seen[static_cast<std::size_t>(i)], i < numel ? 1 : 0) << i;
  }
}

/// kHuge zeros of which no page exists before it is touched.
template <class Element>
class HugeArray {
 public:
  HugeArray()
      : memory_(mmap(nullptr,
                     kBytes,
                     PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1,
                     0)) {}
  ~HugeArray() {
    if (there()) munmap(memory_, kBytes);
  }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  HugeArray(HugeArray&&) = delete;
  HugeArray& operator=(HugeArray&&) = delete;
  [[nodiscard]] bool there() const { return memory_ != MAP_FAILED; }
  [[nodiscard]] Element* data() const { return static_cast<Element*>(memory_); }
  Element& last() const { return data()[kHuge - 1]; }

 private:
  static constexpr std::size_t kBytes = static_cast<std::size_t>(kHuge) * sizeof(Element);
  void* const memory_;
};

TEST(CudaGeometry, FoldsCastsAndFillsReachElement2To32) {
  const HugeArray<float> acc;
  const HugeArray<std::uint16_t> bf16;
  if (!acc.there() || !bf16.there()) GTEST_SKIP() << "no 24 GiB of address space";
  const std::int64_t last_tile = divided_up(kHuge, kTileNumel) - 1;
  bf16.last() = 0x4000;  // 2
  acc.last() = 1.0F;
  const Slice slices[] = {{bf16.data(), Dtype::kBFloat16}};
  for_fold_launches(slices, kHuge, acc.data(), Accumulator::kContinue,
                    [&](const FoldLaunch& launch) { fold_groups(launch, last_tile, 0); });
  EXPECT_EQ(acc.last(), 3.0F);
  const WidenLaunch widen{acc.data(), bf16.data(), Dtype::kBFloat16, true, true, kHuge};
  widen_groups(widen, last_tile, 0);
  EXPECT_EQ(acc.last(), 2.0F);
  fill_groups({acc.data(), 7.0F, true, kHuge}, last_tile, 0);
  EXPECT_EQ(acc.last(), 7.0F);
  multiply_groups({acc.data(), 0.5F, true, kHuge}, last_tile, 0);
  EXPECT_EQ(acc.last(), 3.5F);
  EXPECT_EQ(acc.data()[0], 0.0F);
}

TEST(CudaGeometry, UpdatesAndNormsReachElement2To32) {
  const HugeArray<float> grad;
  const HugeArray<float> param;
  if (!grad.there() || !param.there()) GTEST_SKIP() << "no 32 GiB of address space";
  grad.last() = 2.0F;
  param.last() = 5.0F;
  UpdateArrays arrays;
  arrays.grad = grad.data();
  arrays.param = param.data();
  arrays.numel = kHuge;
  const Fragment fragment = fragment_of(arrays);
  const Piece last = piece_of(0, kHuge, piece_count(kHuge) - 1);
  const auto sgd = SgdUpdate<false, false>::at_step(0.5, 0.0, 0.0, 0.0, 1, 1.0);
  for (int lane = 0; lane < kWarp; ++lane) update_lane(sgd, fragment, last, lane);
  EXPECT_EQ(param.last(), 4.0F);  // 5 - 0.5 * 2
  EXPECT_EQ(lane_sum(fragment.grad + last.begin, last.numel, 0), 4.0);
  EXPECT_EQ(param.data()[0], 0.0F);
}

}  // namespace
}  // namespace tandem::kernels::cuda
