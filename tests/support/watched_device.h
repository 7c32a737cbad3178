// tests/support/watched_device.h: a simulated device that sees who uses memory which is not his
// any more, and whose memory can run out. For tests of comm/ and of whole engines.
#pragma once

#include "kernels/device.h"
#include "kernels/simulated_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tandem::test_support {

/// A simulated device whose memory can run out, and that shows who uses memory after it was freed:
/// it is filled with NaN of every type then, kept, and looked at in the end.
class WatchedDevice final : public kernels::Device {
 public:
  explicit WatchedDevice(kernels::QueueDelays delays)
      : device_(kernels::make_simulated_device(delays)), heap_(std::make_shared<Heap>()) {}
  ~WatchedDevice() override {
    const std::lock_guard lock(heap_->mutex);
    for (const auto& [memory, bytes] : heap_->freed) {
      const bool untouched = std::all_of(memory.get(), memory.get() + bytes,
                                         [](std::byte value) { return value == kFreed; });
      EXPECT_TRUE(untouched) << "memory was written after it had been freed";
    }
  }
  WatchedDevice(const WatchedDevice&) = delete;
  WatchedDevice& operator=(const WatchedDevice&) = delete;
  WatchedDevice(WatchedDevice&&) = delete;
  WatchedDevice& operator=(WatchedDevice&&) = delete;

  void set_limit(std::size_t bytes) { heap_->limit = bytes; }
  [[nodiscard]] std::size_t allocated() const { return heap_->bytes; }

  [[nodiscard]] std::string name() const override { return "watched"; }
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    if (heap_->bytes + bytes > heap_->limit) {
      throw kernels::OutOfDeviceMemory("asked for " + std::to_string(bytes) + " bytes");
    }
    heap_->bytes += bytes;
    std::shared_ptr<std::byte> memory = device_->allocate(bytes);
    return {memory.get(), [memory, bytes, heap = heap_](std::byte* data) {
              std::fill_n(data, bytes, kFreed);
              const std::lock_guard lock(heap->mutex);
              heap->bytes -= bytes;
              heap->freed.emplace_back(memory, bytes);
            }};
  }
  [[nodiscard]] std::shared_ptr<std::byte> allocate_host(std::size_t bytes) override {
    return device_->allocate_host(bytes);
  }
  [[nodiscard]] std::unique_ptr<kernels::Stream> make_stream(kernels::Priority priority) override {
    return device_->make_stream(priority);
  }
  void copy(kernels::Stream& stream, void* to, const void* from, std::size_t bytes) override {
    device_->copy(stream, to, from, bytes);
  }
  void zero(kernels::Stream& stream, void* to, std::size_t bytes) override {
    device_->zero(stream, to, bytes);
  }
  void fill(kernels::Stream& stream, float* to, float value, std::int64_t numel) override {
    device_->fill(stream, to, value, numel);
  }
  void multiply(kernels::Stream& stream, float* x, float factor, std::int64_t numel) override {
    device_->multiply(stream, x, factor, numel);
  }
  void widen(kernels::Stream& stream,
             float* to,
             const void* from,
             kernels::Dtype dtype,
             std::int64_t numel) override {
    device_->widen(stream, to, from, dtype, numel);
  }
  void fold(kernels::Stream& stream,
            std::span<const kernels::Slice> slices,
            std::int64_t numel,
            float* acc,
            kernels::Accumulator state) override {
    device_->fold(stream, slices, numel, acc, state);
  }
  [[nodiscard]] std::unique_ptr<kernels::FragmentTable> make_table(
      std::vector<kernels::UpdateArrays> fragments, std::vector<std::size_t> ends) override {
    return device_->make_table(std::move(fragments), std::move(ends));
  }

 private:
  static constexpr std::byte kFreed{0xFF};
  struct Heap {
    std::mutex mutex;
    std::atomic<std::size_t> bytes{0};
    std::atomic<std::size_t> limit{std::numeric_limits<std::size_t>::max()};
    std::list<std::pair<std::shared_ptr<std::byte>, std::size_t>> freed;
  };
  const std::unique_ptr<kernels::Device> device_;
  const std::shared_ptr<Heap> heap_;
};

}  // namespace tandem::test_support
