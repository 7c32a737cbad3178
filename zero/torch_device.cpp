#include "zero/torch_device.h"

#include <ATen/core/Tensor.h>

#include <utility>

namespace tandem::zero {
namespace {

class TorchCpu final : public TorchDevice {
 public:
  explicit TorchCpu(std::unique_ptr<kernels::Device> device) : device_(std::move(device)) {}

  [[nodiscard]] kernels::Device& device() override { return *device_; }
  [[nodiscard]] kernels::Stream& current() override { return stream_; }
  void before_torch() override {}
  void keep(const at::Tensor& /*tensor*/) override {}
  [[nodiscard]] bool holds(const at::Tensor& tensor) const override {
    return tensor.device().is_cpu();
  }
  [[nodiscard]] at::Tensor tensor_over(std::byte* data,
                                       std::span<const std::int64_t> sizes,
                                       kernels::Dtype dtype,
                                       std::shared_ptr<void> owner) const override {
    return zero::tensor_over(data, sizes, dtype, std::move(owner));
  }

 private:
  const std::unique_ptr<kernels::Device> device_;
  kernels::ImmediateStream stream_;
};

}  // namespace

std::unique_ptr<TorchDevice> make_torch_cpu(kernels::ParallelFor parallel) {
  return std::make_unique<TorchCpu>(kernels::make_cpu_device(std::move(parallel)));
}

std::unique_ptr<TorchDevice> make_torch_cpu() {
  return std::make_unique<TorchCpu>(kernels::make_cpu_device());
}

}  // namespace tandem::zero
