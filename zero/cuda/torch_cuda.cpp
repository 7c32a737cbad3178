// zero/cuda/torch_cuda.cpp: streams and memory that LibTorch owns, as ours.
#include "zero/torch_cuda.h"

#include "kernels/cuda_device.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tandem::zero {
namespace {

class TorchCuda final : public TorchDevice {
 public:
  explicit TorchCuda(int index)
      : where_(c10::kCUDA, static_cast<c10::DeviceIndex>(index)),
        // What LibTorch's cache holds is free memory that CUDA knows nothing of.
        device_(kernels::make_cuda_device(index,
                                          [] { c10::cuda::CUDACachingAllocator::emptyCache(); })) {}

  [[nodiscard]] kernels::Device& device() override { return *device_; }

  // LibTorch takes its streams from a pool that never shrinks, so the table does not grow for ever.
  [[nodiscard]] kernels::Stream& current() override {
    const auto native = reinterpret_cast<std::uintptr_t>(stream().stream());
    const std::lock_guard lock(mutex_);
    std::unique_ptr<kernels::Stream>& known = streams_[native];
    if (!known) known = kernels::wrap_cuda_stream(*device_, native);
    return *known;
  }

  // Both work on the same stream.
  void before_torch() override {}

  // The allocator hands memory out again in the order of the stream that it was allocated on; work
  // of any other stream must be told to it.
  void keep(const at::Tensor& tensor) override {
    c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream());
  }

  [[nodiscard]] bool holds(const at::Tensor& tensor) const override {
    return tensor.device() == where_;
  }

  [[nodiscard]] at::Tensor tensor_over(std::byte* data,
                                       std::span<const std::int64_t> sizes,
                                       kernels::Dtype dtype,
                                       std::shared_ptr<void> owner) const override {
    return zero::tensor_over(data, sizes, dtype, std::move(owner), where_.index());
  }

 private:
  [[nodiscard]] c10::cuda::CUDAStream stream() const {
    return c10::cuda::getCurrentCUDAStream(where_.index());
  }

  const c10::Device where_;
  const std::unique_ptr<kernels::Device> device_;
  std::mutex mutex_;
  std::unordered_map<std::uintptr_t, std::unique_ptr<kernels::Stream>> streams_;
};

}  // namespace

std::unique_ptr<TorchDevice> make_torch_cuda(int index) {
  return std::make_unique<TorchCuda>(index);
}

}  // namespace tandem::zero
