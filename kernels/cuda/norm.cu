// kernels/cuda/norm.cu: sums of squares (sum.cuh), and the largest magnitude.
#include "kernels/cuda/sum.cuh"

namespace tandem::kernels::cuda {
namespace {

using ReduceLargest = cub::BlockReduce<std::uint32_t, kThreads>;

struct Larger {
  __device__ std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const {
    return a > b ? a : b;
  }
};

/// Block b leaves what it found in partials[b].
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ NormLaunch norm) {
  __shared__ typename ReduceLargest::TempStorage storage;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  std::uint32_t own = 0;
  for (std::int64_t p = warp_of_grid(); p < norm.count; p += warps_of_grid()) {
    const Piece piece = norm.pieces[p];
    if (norm.chosen[piece.fragment] == 0) continue;
    const float* const grad = norm.fragments[piece.fragment].grad + piece.begin;
    own = Larger()(own, lane_largest(grad, piece.numel, lane));
  }
  own = ReduceLargest(storage).Reduce(own, Larger());
  if (threadIdx.x == 0) norm.partials[blockIdx.x] = own;
}

/// The one block finds the largest of all.
__global__ void __launch_bounds__(kThreads)
    largest_partials_kernel(const __grid_constant__ PartialsLaunch launch) {
  __shared__ typename ReduceLargest::TempStorage storage;
  std::uint32_t own = 0;
  for (int b = static_cast<int>(threadIdx.x); b < launch.blocks; b += kThreads) {
    own = Larger()(own, static_cast<std::uint32_t>(launch.partials[b]));
  }
  own = ReduceLargest(storage).Reduce(own, Larger());
  if (threadIdx.x == 0) launch.words[0] = own;
}

}  // namespace

void launch_sum_squares(cudaStream_t stream, const NormLaunch& norm) {
  launch_sum<false>(stream, norm);
}

void launch_find_largest(cudaStream_t stream, const NormLaunch& norm) {
  const std::int64_t blocks = norm_blocks(norm.count);
  launch("the maximum's kernel", largest_kernel, blocks, stream, norm);
  const PartialsLaunch partials{norm.partials, static_cast<std::int32_t>(blocks), norm.words};
  launch("the maximum's second kernel", largest_partials_kernel, 1, stream, partials);
}

}  // namespace tandem::kernels::cuda
