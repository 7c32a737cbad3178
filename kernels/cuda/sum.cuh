// kernels/cuda/sum.cuh: sums of squares (norm.cu) or powers (powers.cu). A warp takes a piece,
// block by block of 1,024 elements, and keeps a superaccumulator with a word a lane; the warps of a
// thread block add theirs, and a second, small kernel adds the thread blocks'. No atomic operation;
// integers only beyond a warp.
//
// The first grid is at most NormLaunch::kMostBlocks, about what fills the largest GPUs: its
// warps go on from piece to piece, so that few words are left for the second kernel.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/norm_body.h"

#include <cub/block/block_reduce.cuh>

namespace tandem::kernels::cuda {
namespace {

constexpr int kWords = Superaccumulator::kWords;

/// N2's tree. Lane 0 has the sum; what the others hold is of no use.
__device__ double warp_sum(double lane) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    lane += __shfl_down_sync(0xFFFFFFFFU, lane, half);
  }
  return lane;
}

/// One block's sum, in all lanes.
template <bool kPowers>
__device__ double block_sum(const float* x, std::int32_t numel, int lane, const Power& power) {
  double sum = 0.0;
  if constexpr (kPowers) {
    sum = on_grid(warp_sum(lane_sum(x, numel, lane, power)));
  } else {
    sum = warp_sum(lane_sum(x, numel, lane));
  }
  return __shfl_sync(0xFFFFFFFFU, sum, 0);
}

template <bool kPowers>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ NormLaunch norm) {
  __shared__ std::int64_t words[kWarps][kWords];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  std::int64_t own = 0;  // word `lane`
  for (std::int64_t p = warp_of_grid(); p < norm.count; p += warps_of_grid()) {
    const Piece piece = norm.pieces[p];  // the same for all lanes: no divergence below
    if (norm.chosen[piece.fragment] == 0) continue;
    const float* const grad = norm.fragments[piece.fragment].grad + piece.begin;
    for (std::int32_t begin = 0; begin < piece.numel; begin += kNormBlock) {
      const std::int32_t rest = piece.numel - begin;
      const std::int32_t numel = rest < kNormBlock ? rest : static_cast<std::int32_t>(kNormBlock);
      own += word_of(block_sum<kPowers>(grad + begin, numel, lane, norm.power), lane);
    }
  }
  if (lane < kWords) words[warp][lane] = own;
  __syncthreads();
  if (threadIdx.x < kWords) {
    std::int64_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += words[w][threadIdx.x];
    const int word = static_cast<int>(threadIdx.x);
    norm.partials[partial_index(word, blockIdx.x, gridDim.x)] = sum;
  }
}

struct PartialsLaunch {
  const std::int64_t* partials = nullptr;  // [kWords][blocks]; of a maximum [blocks]
  std::int32_t blocks = 0;
  std::int64_t* words = nullptr;  // [kWords]; of a maximum the first
};

/// Block k adds word k of all.
__global__ void __launch_bounds__(kThreads)
    partials_kernel(const __grid_constant__ PartialsLaunch launch) {
  using Reduce = cub::BlockReduce<std::int64_t, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  std::int64_t sum = 0;
  for (int b = static_cast<int>(threadIdx.x); b < launch.blocks; b += kThreads) {
    sum += launch.partials[partial_index(static_cast<int>(blockIdx.x), b, launch.blocks)];
  }
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) launch.words[blockIdx.x] = sum;
}

template <bool kPowers>
void launch_sum(cudaStream_t stream, const NormLaunch& norm) {
  const std::int64_t blocks = norm_blocks(norm.count);
  launch("the norm's kernel", sum_kernel<kPowers>, blocks, stream, norm);
  const PartialsLaunch partials{norm.partials, static_cast<std::int32_t>(blocks), norm.words};
  launch("the norm's second kernel", partials_kernel, kWords, stream, partials);
}

}  // namespace
}  // namespace tandem::kernels::cuda
