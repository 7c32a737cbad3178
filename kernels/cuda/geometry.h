// kernels/cuda/geometry.h: how work is cut for a GPU: plain arithmetic, tested on the CPU with
// sizes that no memory here could hold.
//
// P1 Every element is in exactly one piece; pieces begin at multiples of kPieceNumel of their
// fragment,
//    therefore at multiples of kNormBlock of their parameter (T1 of kernels/device.h).
// P2 All numbers of elements are 64 bits wide: fragments and buckets beyond 2^32 elements are cut
// like
//    any other.
// P3 What is computed depends on no number below: they change speed only.
// Called by kernels/cuda's table, launches and kernels.
#pragma once

#include "kernels/check.h"
#include "kernels/inline.h"
#include "kernels/norm.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tandem::kernels::cuda {

inline constexpr int kWarp = 32;
/// Threads of a block, for all kernels. 8 warps: small enough that four blocks fit on a
/// multiprocessor at 64 registers a thread, large enough that thousands of scalars take few blocks.
inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kWarp;

/// Elements that a thread moves with one instruction: 16 bytes of fp32, 8 of a 16-bit type.
inline constexpr int kVector = 4;
/// Such groups of a thread in a fill, a cast or a fold: what it has in flight.
inline constexpr int kGroupsOfThread = 2;
inline constexpr std::int64_t kTileNumel =
    std::int64_t{kThreads} * kVector * kGroupsOfThread;  // of a block

/// Elements of a piece, which one warp works on. Two blocks of the norm: 56 KB of an AdamW update,
/// beside which its descriptor of 16 bytes is nothing, and still 512 warps for a million elements.
inline constexpr std::int64_t kPieceNumel = 2 * kNormBlock;

/// A grid's largest first dimension. Kernels go through what lies beyond in strides of the grid.
inline constexpr std::int64_t kMaxBlocks = 0x7FFFFFFF;

/// Part of a fragment. 16 bytes, read at once.
struct alignas(16) Piece {
  std::int64_t begin = 0;  // element of the fragment
  std::int32_t numel = 0;  // at most kPieceNumel
  std::int32_t fragment = 0;
};

/// a / b, rounded up; a >= 0.
TANDEM_HOST_DEVICE constexpr std::int64_t divided_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Blocks for `work` warps or tiles of which a block takes `of_block`. At least 1.
constexpr std::int64_t blocks_for(std::int64_t work, std::int64_t of_block) {
  const std::int64_t blocks = divided_up(work, of_block);
  return blocks < 1 ? 1 : blocks > kMaxBlocks ? kMaxBlocks : blocks;
}

/// The pieces of one fragment of `numel` elements: how many, and the k-th.
constexpr std::int64_t piece_count(std::int64_t numel) { return divided_up(numel, kPieceNumel); }
// NOLINTNEXTLINE(bugprone-easily-swappable-parameters): fragment, its length, which
constexpr Piece piece_of(std::int32_t fragment, std::int64_t numel, std::int64_t k) {
  const std::int64_t begin = k * kPieceNumel;
  const std::int64_t rest = numel - begin;
  return {begin, static_cast<std::int32_t>(rest < kPieceNumel ? rest : kPieceNumel), fragment};
}

/// Where each bucket's pieces end in the table of all: one number a bucket.
[[nodiscard]] inline std::vector<std::int64_t> piece_ends(
    std::span<const std::int64_t> fragment_numels, std::span<const std::size_t> bucket_ends) {
  std::vector<std::int64_t> ends;
  ends.reserve(bucket_ends.size());
  std::int64_t pieces = 0;
  std::size_t f = 0;
  for (const std::size_t end : bucket_ends) {
    TANDEM_ASSERT(end >= f && end <= fragment_numels.size(), "buckets follow each other");
    for (; f < end; ++f) pieces += piece_count(fragment_numels[f]);
    ends.push_back(pieces);
  }
  return ends;
}

/// The pieces of all fragments, one fragment after another.
[[nodiscard]] inline std::vector<Piece> all_pieces(std::span<const std::int64_t> fragment_numels) {
  std::vector<Piece> pieces;
  for (std::size_t f = 0; f < fragment_numels.size(); ++f) {
    const std::int64_t count = piece_count(fragment_numels[f]);
    for (std::int64_t k = 0; k < count; ++k) {
      pieces.push_back(piece_of(static_cast<std::int32_t>(f), fragment_numels[f], k));
    }
  }
  return pieces;
}

}  // namespace tandem::kernels::cuda
