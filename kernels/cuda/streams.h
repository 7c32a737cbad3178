// kernels/cuda/streams.h: what all parts of one CUDA device share, its streams, and its marks.
//
// Q1 A mark is an event recorded once. Events come from a pool and go back to it with the mark's
// last
//    copy: a stream that waits for one has taken its point at the call, so that recording it again
//    changes nothing for it.
// Q2 The shared part lives until the device and everything made of it are gone.
// Called by kernels/cuda's device and table.
#pragma once

#include "kernels/device.h"
#include "kernels/stream.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tandem::kernels::cuda {

class Shared {
 public:
  /// Throws DeviceError. `make_room`: see make_cuda_device().
  explicit Shared(int device, std::function<void()> make_room = nullptr);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  Shared(Shared&&) = delete;
  Shared& operator=(Shared&&) = delete;

  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] std::string name() const { return "cuda:" + std::to_string(device_); }
  /// Of the library's own, on which nothing waits but the host: zeros and tables for new memory.
  [[nodiscard]] cudaStream_t own_stream() const { return own_stream_; }

  /// Where memory is full, before it is asked for again.
  void make_room() const {
    if (make_room_) make_room_();
  }

  /// An event, with times. The device is current.
  [[nodiscard]] cudaEvent_t take_event();
  void give_event_back(cudaEvent_t event) noexcept;

 private:
  const int device_;
  const std::function<void()> make_room_;
  cudaStream_t own_stream_ = nullptr;
  std::mutex mutex_;               // guards what follows
  std::vector<cudaEvent_t> free_;  // has room for all events there are
  std::size_t events_ = 0;
};

using SharedPtr = std::shared_ptr<Shared>;

class CudaStream final : public Stream {
 public:
  enum class Owned : std::uint8_t { kNo, kYes };

  using Stream::wait;
  CudaStream(SharedPtr shared, cudaStream_t native, Owned owned)
      : shared_(std::move(shared)), native_(native), owned_(owned) {}
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  CudaStream(CudaStream&&) = delete;
  CudaStream& operator=(CudaStream&&) = delete;

  [[nodiscard]] Mark record() override;
  void wait(const Mark& mark) override;
  [[nodiscard]] std::uintptr_t id() const override {
    return reinterpret_cast<std::uintptr_t>(native_);
  }
  [[nodiscard]] cudaStream_t native() const { return native_; }

 private:
  const SharedPtr shared_;
  const cudaStream_t native_;
  const Owned owned_;
};

/// Non-blocking: it knows nothing of the default stream. Throws DeviceError.
[[nodiscard]] std::unique_ptr<Stream> make_stream(const SharedPtr& shared, Priority priority);

/// Throws DeviceError if it is no CUDA stream.
[[nodiscard]] cudaStream_t native_of(Stream& stream);

/// [bytes] zeros on the device, or on the host in pinned memory. Throw OutOfDeviceMemory.
[[nodiscard]] std::shared_ptr<std::byte> allocate(const SharedPtr& shared, std::size_t bytes);
[[nodiscard]] std::shared_ptr<std::byte> allocate_host(const SharedPtr& shared, std::size_t bytes);

}  // namespace tandem::kernels::cuda
