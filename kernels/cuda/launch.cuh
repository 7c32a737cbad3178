// kernels/cuda/launch.cuh: how kernels are launched, apart from what they do: a grid of blocks of
// kThreads threads (geometry.h), and the launch's own error, not one that somebody left behind.
#pragma once

#include "kernels/cuda/errors.h"
#include "kernels/cuda/geometry.h"

#include <cuda_runtime.h>

#include <cstdint>

namespace tandem::kernels::cuda {

template <class Arguments>
void launch(const char* name,
            void (*kernel)(Arguments),
            std::int64_t blocks,
            cudaStream_t stream,
            const Arguments& arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, arguments), name);
}

/// The warp's number in the grid, and how many there are.
__device__ inline std::int64_t warp_of_grid() {
  return std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
}
__device__ inline std::int64_t warps_of_grid() { return std::int64_t{gridDim.x} * kWarps; }

}  // namespace tandem::kernels::cuda
