// kernels/cuda/fold.cu: folds, products, casts and fills. One thread handles kGroupsOfThread groups
// of kVector elements of a tile; a block takes a tile, and further ones only where the grid has no
// more blocks.
#include "kernels/cuda/fold_body.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launches.h"

namespace tandem::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ FoldLaunch fold) {
  const std::int64_t tiles = divided_up(fold.numel, kTileNumel);
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    fold_groups(fold, tile, static_cast<int>(threadIdx.x));
  }
}

__global__ void __launch_bounds__(kThreads)
    widen_kernel(const __grid_constant__ WidenLaunch widen) {
  const std::int64_t tiles = divided_up(widen.numel, kTileNumel);
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    widen_groups(widen, tile, static_cast<int>(threadIdx.x));
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillLaunch fill) {
  const std::int64_t tiles = divided_up(fill.numel, kTileNumel);
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    fill_groups(fill, tile, static_cast<int>(threadIdx.x));
  }
}

__global__ void __launch_bounds__(kThreads)
    multiply_kernel(const __grid_constant__ MultiplyLaunch multiply) {
  const std::int64_t tiles = divided_up(multiply.numel, kTileNumel);
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    multiply_groups(multiply, tile, static_cast<int>(threadIdx.x));
  }
}

}  // namespace

void check_kernels() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, fold_kernel), "cudaFuncGetAttributes");
}

void launch_fold(cudaStream_t stream, const FoldLaunch& fold) {
  if (fold.numel <= 0) return;
  launch("the fold's kernel", fold_kernel, blocks_for(fold.numel, kTileNumel), stream, fold);
}

void launch_widen(cudaStream_t stream, const WidenLaunch& widen) {
  if (widen.numel <= 0) return;
  launch("the cast's kernel", widen_kernel, blocks_for(widen.numel, kTileNumel), stream, widen);
}

void launch_multiply(cudaStream_t stream, const MultiplyLaunch& multiply) {
  if (multiply.numel <= 0) return;
  launch("the multiplication's kernel", multiply_kernel, blocks_for(multiply.numel, kTileNumel),
         stream, multiply);
}

void launch_fill(cudaStream_t stream, const FillLaunch& fill) {
  if (fill.numel <= 0) return;
  launch("the fill's kernel", fill_kernel, blocks_for(fill.numel, kTileNumel), stream, fill);
}

}  // namespace tandem::kernels::cuda
