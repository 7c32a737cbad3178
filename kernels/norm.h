// kernels/norm.h: sums of squares with the same bits on every machine, ISA and world size.
//
// N1 A block is at most kNormBlock consecutive elements of one parameter, counted from its start.
// N2 A block is summed in double over kNormLanes fixed lanes (element i goes to lane i mod 32, in
//    order of i) and then over a fixed tree (lane l += lane l + 16, 8, 4, 2, 1).
// N3 Blocks are added exactly (Superaccumulator), so their order and owner do not matter.
// Called by zero (norm of a shard).
#pragma once

#include "kernels/superaccumulator.h"

#include <cstdint>

namespace tandem::kernels {

inline constexpr std::int64_t kNormBlock = 1024;
inline constexpr int kNormLanes = 32;

/// Sum of squares of x[0, numel), numel <= kNormBlock. Non-finite if any element is non-finite.
double block_sum_of_squares(const float* x, std::int64_t numel);

/// Adds the blocks of x[0, numel) to `sum`; x starts at a multiple of kNormBlock elements of its
/// parameter. Non-finite blocks are counted in `sum` instead of added. Reads 4 * numel bytes.
void add_sum_of_squares(const float* x, std::int64_t numel, Superaccumulator& sum);

}  // namespace tandem::kernels
