// kernels/cuda/norm.cu: sums of squares. A warp takes a piece, block by block of 1,024 elements,
// and keeps a superaccumulator with a word a lane; the warps of a thread block add theirs, and a
// second, small kernel adds the thread blocks'. No atomic operation; integers only beyond a warp.
//
// The first grid is at most SquaresLaunch::kMostBlocks, about what fills the largest GPUs: its
// warps go on from piece to piece, so that few words are left for the second kernel.
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

__global__ void __launch_bounds__(kThreads)
    squares_kernel(const __grid_constant__ SquaresLaunch squares) {
  __shared__ std::int64_t words[kWarps][kWords];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  std::int64_t own = 0;  // word `lane`
  for (std::int64_t p = warp_of_grid(); p < squares.count; p += warps_of_grid()) {
    const Piece piece = squares.pieces[p];  // the same for all lanes: no divergence below
    if (squares.chosen[piece.fragment] == 0) continue;
    const float* const grad = squares.fragments[piece.fragment].grad + piece.begin;
    for (std::int32_t begin = 0; begin < piece.numel; begin += kNormBlock) {
      const std::int32_t rest = piece.numel - begin;
      const std::int32_t numel = rest < kNormBlock ? rest : static_cast<std::int32_t>(kNormBlock);
      const double block = warp_sum(lane_sum(grad + begin, numel, lane));
      own += word_of(__shfl_sync(0xFFFFFFFFU, block, 0), lane);
    }
  }
  if (lane < kWords) words[warp][lane] = own;
  __syncthreads();
  if (threadIdx.x < kWords) {
    std::int64_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += words[w][threadIdx.x];
    const int word = static_cast<int>(threadIdx.x);
    squares.partials[partial_index(word, blockIdx.x, gridDim.x)] = sum;
  }
}

struct PartialsLaunch {
  const std::int64_t* partials = nullptr;  // [kWords][blocks]
  std::int32_t blocks = 0;
  std::int64_t* words = nullptr;  // [kWords]
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

}  // namespace

void launch_sum_squares(cudaStream_t stream, const SquaresLaunch& squares) {
  const std::int64_t blocks = squares_blocks(squares.count);
  launch("the norm's kernel", squares_kernel, blocks, stream, squares);
  const PartialsLaunch partials{squares.partials, static_cast<std::int32_t>(blocks), squares.words};
  launch("the norm's second kernel", partials_kernel, kWords, stream, partials);
}

}  // namespace tandem::kernels::cuda
