#include "kernels/cuda/streams.h"

#include "kernels/cuda/errors.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace tandem::kernels::cuda {
namespace {

class CudaMark final : public Mark::State {
 public:
  /// Takes an event and gives it back. The device is current.
  CudaMark(SharedPtr shared, cudaStream_t stream)
      : shared_(std::move(shared)), event_(shared_->take_event()) {
    const cudaError_t error = cudaEventRecord(event_, stream);
    if (error == cudaSuccess) return;
    shared_->give_event_back(event_);
    check(error, "cudaEventRecord");
  }
  ~CudaMark() override { shared_->give_event_back(event_); }
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;
  CudaMark(CudaMark&&) = delete;
  CudaMark& operator=(CudaMark&&) = delete;

  [[nodiscard]] bool complete() const override {
    if (complete_.load(std::memory_order_acquire)) return true;
    const CurrentDevice current(shared_->device());
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      ignore(error);  // no error: somebody's next cudaGetLastError() must not find it
      return false;
    }
    check(error, "cudaEventQuery");
    complete_.store(true, std::memory_order_release);
    return true;
  }

  [[nodiscard]] double seconds_since(const State& earlier) const override {
    const auto* const from = dynamic_cast<const CudaMark*>(&earlier);
    if (from == nullptr) throw DeviceError("seconds_since: a mark of another kind of device");
    const CurrentDevice current(shared_->device());
    float milliseconds = 0.0F;
    check(cudaEventElapsedTime(&milliseconds, from->event_, event_), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

  [[nodiscard]] cudaEvent_t event() const { return event_; }
  /// Without asking the device.
  [[nodiscard]] bool known_complete() const { return complete_.load(std::memory_order_acquire); }

 private:
  const SharedPtr shared_;
  const cudaEvent_t event_;
  mutable std::atomic<bool> complete_{false};
};

}  // namespace

Shared::Shared(int device, std::function<void()> make_room)
    : device_(device), make_room_(std::move(make_room)) {
  const CurrentDevice current(device);
  check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking),
        "cudaStreamCreateWithFlags");
}

Shared::~Shared() {
  const CurrentDevice current(device_, std::nothrow);
  for (cudaEvent_t event : free_) ignore(cudaEventDestroy(event));
  ignore(cudaStreamDestroy(own_stream_));
}

cudaEvent_t Shared::take_event() {
  const std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    cudaEvent_t event = free_.back();
    free_.pop_back();
    return event;
  }
  // Doubled by hand: reserve() may allocate exactly what it is asked for.
  if (free_.capacity() < events_ + 1) free_.reserve(std::max<std::size_t>(64, 2 * events_));
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDefault), "cudaEventCreateWithFlags");
  ++events_;
  return event;
}

void Shared::give_event_back(cudaEvent_t event) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);  // within its capacity
}

CudaStream::~CudaStream() {
  if (owned_ == Owned::kNo) return;
  const CurrentDevice current(shared_->device(), std::nothrow);
  ignore(cudaStreamDestroy(native_));  // what it was given is still done
}

Mark CudaStream::record() {
  const CurrentDevice current(shared_->device());
  return Mark(std::make_shared<CudaMark>(shared_, native_));
}

void CudaStream::wait(const Mark& mark) {
  if (mark.state() == nullptr) return;
  const auto* const state = dynamic_cast<const CudaMark*>(mark.state());
  if (state == nullptr) {
    throw DeviceError("a stream of " + shared_->name() + " waits for a mark of another kind");
  }
  if (state->known_complete()) return;
  const CurrentDevice current(shared_->device());
  check(cudaStreamWaitEvent(native_, state->event(), 0), "cudaStreamWaitEvent");
}

std::unique_ptr<Stream> make_stream(const SharedPtr& shared, Priority priority) {
  const CurrentDevice current(shared->device());
  int least = 0;
  int greatest = 0;  // the smaller number is the higher priority
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t native = nullptr;
  check(cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking,
                                     priority == Priority::kHigh ? greatest : least),
        "cudaStreamCreateWithPriority");
  try {
    return std::make_unique<CudaStream>(shared, native, CudaStream::Owned::kYes);
  } catch (...) {
    ignore(cudaStreamDestroy(native));
    throw;
  }
}

cudaStream_t native_of(Stream& stream) {
  auto* const own = dynamic_cast<CudaStream*>(&stream);
  if (own == nullptr) throw DeviceError("a CUDA device was given work for another kind of stream");
  return own->native();
}

std::shared_ptr<std::byte> allocate(const SharedPtr& shared, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const CurrentDevice current(shared->device());
  void* memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaErrorMemoryAllocation) {
    ignore(error);
    shared->make_room();
    error = cudaMalloc(&memory, bytes);
  }
  if (error == cudaErrorMemoryAllocation) {
    ignore(error);
    std::size_t free = 0;
    std::size_t total = 0;
    ignore(cudaMemGetInfo(&free, &total));
    throw OutOfDeviceMemory("cudaMalloc on " + shared->name() + ": " + std::to_string(bytes) +
                            " bytes could not be had; " + std::to_string(free) + " of " +
                            std::to_string(total) +
                            " are free (other processes and LibTorch's cache hold the rest)");
  }
  check(error, "cudaMalloc");
  std::shared_ptr<std::byte> owner(static_cast<std::byte*>(memory), [shared](std::byte* start) {
    const CurrentDevice there(shared->device(), std::nothrow);
    ignore(cudaFree(start));
  });
  // Seen by every stream that is given work after this returns.
  check(cudaMemsetAsync(memory, 0, bytes, shared->own_stream()), "cudaMemsetAsync");
  check(cudaStreamSynchronize(shared->own_stream()), "cudaStreamSynchronize");
  return owner;
}

std::shared_ptr<std::byte> allocate_host(const SharedPtr& shared, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const CurrentDevice current(shared->device());
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    ignore(error);
    throw OutOfDeviceMemory("cudaHostAlloc: " + std::to_string(bytes) +
                            " bytes of pinned host memory could not be had");
  }
  check(error, "cudaHostAlloc");
  std::shared_ptr<std::byte> owner(static_cast<std::byte*>(memory), [shared](std::byte* start) {
    const CurrentDevice there(shared->device(), std::nothrow);
    ignore(cudaFreeHost(start));
  });
  std::memset(memory, 0, bytes);
  return owner;
}

}  // namespace tandem::kernels::cuda
