// zero/torch_cuda.h: a CUDA device as LibTorch uses it: its current stream, its caching allocator.
// Called by engine (lanes).
#pragma once

#include "zero/torch_device.h"

#include <memory>

namespace tandem::zero {

/// `index`: of the device, as in "cuda:1". LibTorch's CUDA library is loaded already. Throws
/// kernels::DeviceError, also in a build without CUDA.
[[nodiscard]] std::unique_ptr<TorchDevice> make_torch_cuda(int index);

}  // namespace tandem::zero
