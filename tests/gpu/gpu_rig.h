// tests/gpu/gpu_rig.h: GPU 0 and the CPU side by side, and arrays on the GPU.
#pragma once

#include "kernels/cpu_device.h"
#include "kernels/cuda_device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace tandem::kernels {

class OnGpu : public testing::Test {
 protected:
  void finish(Stream& of) {
    ASSERT_TRUE(of.record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(2)));
  }

  const std::unique_ptr<Device> gpu = make_cuda_device(0);
  const std::unique_ptr<Stream> stream = gpu->make_stream(Priority::kNormal);
};

/// A vector's contents on the GPU; `offset` elements into it, arrays of kernels begin.
template <class Element>
class Mirror {
 public:
  Mirror(Device& gpu, Stream& stream, const std::vector<Element>& values)
      : gpu_(gpu), numel_(values.size()), memory_(gpu.allocate(bytes())) {
    // The source may be pageable: the copy has read it when the call returns.
    gpu.copy(stream, memory_.get(), values.data(), bytes());
  }
  [[nodiscard]] Element* data() const { return reinterpret_cast<Element*>(memory_.get()); }
  /// What is there once everything given to `stream` is done.
  [[nodiscard]] std::vector<Element> read(Stream& stream) const {
    std::vector<Element> values(numel_);
    const auto host = gpu_.allocate_host(bytes());
    gpu_.copy(stream, host.get(), memory_.get(), bytes());
    EXPECT_TRUE(
        stream.record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(2)));
    if (numel_ > 0) std::memcpy(values.data(), host.get(), bytes());
    return values;
  }

 private:
  [[nodiscard]] std::size_t bytes() const { return numel_ * sizeof(Element); }

  Device& gpu_;
  const std::size_t numel_;
  const std::shared_ptr<std::byte> memory_;
};

}  // namespace tandem::kernels
