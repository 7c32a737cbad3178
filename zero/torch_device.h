// zero/torch_device.h: a kernels::Device as LibTorch uses it: whose stream a call is made on, and
// tensors over its memory.
//
// Our work on a tensor that the user sees goes to the stream on which his own work runs, current(),
// taken anew at each call; so it is ordered with his forward and backward without any wait.
// Called by zero and engine.
#pragma once

#include "kernels/cpu_device.h"
#include "kernels/device.h"
#include "zero/tensor_type.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace at {
class Tensor;
}

namespace tandem::zero {

class TorchDevice {
 public:
  TorchDevice() = default;
  virtual ~TorchDevice() = default;
  TorchDevice(const TorchDevice&) = delete;
  TorchDevice& operator=(const TorchDevice&) = delete;
  TorchDevice(TorchDevice&&) = delete;
  TorchDevice& operator=(TorchDevice&&) = delete;

  [[nodiscard]] virtual kernels::Device& device() = 0;
  /// LibTorch's stream on the calling thread. Lives as long as this object.
  [[nodiscard]] virtual kernels::Stream& current() = 0;
  /// Before LibTorch works on memory that was given to current(): its work comes after. A GPU's
  /// stream sees to that by itself.
  virtual void before_torch() = 0;
  /// What was given to current() may still read `tensor`: its memory is not used again before.
  virtual void keep(const at::Tensor& tensor) = 0;
  /// True if the tensor lies on this device.
  [[nodiscard]] virtual bool holds(const at::Tensor& tensor) const = 0;
  /// A contiguous tensor over `data`, which `owner` (if any) keeps alive as long as the tensor.
  [[nodiscard]] virtual at::Tensor tensor_over(std::byte* data,
                                               std::span<const std::int64_t> sizes,
                                               kernels::Dtype dtype,
                                               std::shared_ptr<void> owner) const = 0;
};

/// The CPU; `parallel`: see kernels::make_cpu_device().
[[nodiscard]] std::unique_ptr<TorchDevice> make_torch_cpu(kernels::ParallelFor parallel);
/// All on the calling thread.
[[nodiscard]] std::unique_ptr<TorchDevice> make_torch_cpu();

}  // namespace tandem::zero
