// kernels/cuda/device.cpp: kernels/cuda_device.h with CUDA.
#include "kernels/check.h"
#include "kernels/cuda/errors.h"
#include "kernels/cuda/launches.h"
#include "kernels/cuda/streams.h"
#include "kernels/cuda/table.h"
#include "kernels/cuda_device.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <span>
#include <utility>

namespace tandem::kernels {
namespace {

using cuda::check;
using cuda::CurrentDevice;
using cuda::native_of;

class CudaDevice final : public Device {
 public:
  CudaDevice(int index, std::function<void()> make_room)
      : shared_(std::make_shared<cuda::Shared>(index, std::move(make_room))) {
    const CurrentDevice current(index);
    cuda::check_kernels();
  }

  [[nodiscard]] const cuda::SharedPtr& shared() const { return shared_; }

  [[nodiscard]] std::string name() const override { return shared_->name(); }
  [[nodiscard]] std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return cuda::allocate(shared_, bytes);
  }
  [[nodiscard]] std::shared_ptr<std::byte> allocate_host(std::size_t bytes) override {
    return cuda::allocate_host(shared_, bytes);
  }
  [[nodiscard]] std::unique_ptr<Stream> make_stream(Priority priority) override {
    return cuda::make_stream(shared_, priority);
  }

  void copy(Stream& stream, void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    const CurrentDevice current(shared_->device());
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native_of(stream)),
          "cudaMemcpyAsync");
  }
  void zero(Stream& stream, void* to, std::size_t bytes) override {
    if (bytes == 0) return;
    const CurrentDevice current(shared_->device());
    check(cudaMemsetAsync(to, 0, bytes, native_of(stream)), "cudaMemsetAsync");
  }
  // NOLINTNEXTLINE(bugprone-easily-swappable-parameters)
  void fill(Stream& stream, float* to, float value, std::int64_t numel) override {
    const CurrentDevice current(shared_->device());
    cuda::FillLaunch fill;
    fill.to = to;
    fill.value = value;
    fill.vector = cuda::vector_start(to, sizeof(float));
    fill.numel = numel;
    cuda::launch_fill(native_of(stream), fill);
  }
  // NOLINTNEXTLINE(bugprone-easily-swappable-parameters)
  void multiply(Stream& stream, float* x, float factor, std::int64_t numel) override {
    const CurrentDevice current(shared_->device());
    cuda::MultiplyLaunch multiply;
    multiply.x = x;
    multiply.factor = factor;
    multiply.vector = cuda::vector_start(x, sizeof(float));
    multiply.numel = numel;
    cuda::launch_multiply(native_of(stream), multiply);
  }
  void widen(
      Stream& stream, float* to, const void* from, Dtype dtype, std::int64_t numel) override {
    if (dtype == Dtype::kFloat32) {
      return copy(stream, to, from, static_cast<std::size_t>(numel) * sizeof(float));
    }
    const CurrentDevice current(shared_->device());
    cuda::WidenLaunch widen;
    widen.to = to;
    widen.from = from;
    widen.dtype = dtype;
    widen.to_vector = cuda::vector_start(to, sizeof(float));
    widen.from_vector = cuda::vector_start(from, bytes_of(dtype));
    widen.numel = numel;
    cuda::launch_widen(native_of(stream), widen);
  }
  void fold(Stream& stream,
            std::span<const Slice> slices,
            std::int64_t numel,
            float* acc,
            Accumulator state) override {
    TANDEM_ASSERT(numel >= 0, "a fold has no negative length");
    if (numel == 0) return;
    const CurrentDevice current(shared_->device());
    cuda::for_fold_launches(slices, numel, acc, state, [&](const cuda::FoldLaunch& launch) {
      cuda::launch_fold(native_of(stream), launch);
    });
  }

  [[nodiscard]] std::unique_ptr<FragmentTable> make_table(
      std::vector<UpdateArrays> fragments, std::vector<std::size_t> bucket_ends) override {
    return cuda::make_table(shared_, fragments, std::move(bucket_ends));
  }

 private:
  const cuda::SharedPtr shared_;
};

std::string hex(const unsigned char* bytes, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    char two[3];
    static_cast<void>(std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(bytes[i])));
    text += two;
  }
  return text;
}

}  // namespace

bool cuda_built() { return true; }

int cuda_device_count() noexcept {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  cuda::ignore(error);
  return error == cudaSuccess ? count : 0;
}

std::unique_ptr<Device> make_cuda_device(int index, std::function<void()> make_room) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (index < 0 || index >= count) {
    throw DeviceError("cuda:" + std::to_string(index) + ": this process sees " +
                      std::to_string(count) + " GPUs, numbered from 0; see CUDA_VISIBLE_DEVICES");
  }
  return std::make_unique<CudaDevice>(index, std::move(make_room));
}

std::shared_ptr<void> make_cuda_current(int index) {
  return std::make_shared<CurrentDevice>(index);
}

std::string cuda_device_identity(int index) {
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  char bus[32] = {};
  check(cudaDeviceGetPCIBusId(bus, sizeof bus, index), "cudaDeviceGetPCIBusId");
  const auto* const uuid = reinterpret_cast<const unsigned char*>(properties.uuid.bytes);
  return "GPU-" + hex(uuid, 4) + "-" + hex(uuid + 4, 2) + "-" + hex(uuid + 6, 2) + "-" +
         hex(uuid + 8, 2) + "-" + hex(uuid + 10, 6) + " at " + bus;
}

std::unique_ptr<Stream> wrap_cuda_stream(Device& device, std::uintptr_t native) {
  auto* const own = dynamic_cast<CudaDevice*>(&device);
  if (own == nullptr)
    throw DeviceError("wrap_cuda_stream: " + device.name() + " is no CUDA device");
  // NOLINTNEXTLINE(performance-no-int-to-ptr): a handle, which is never followed
  auto* const handle = reinterpret_cast<cudaStream_t>(native);
  return std::make_unique<cuda::CudaStream>(own->shared(), handle, cuda::CudaStream::Owned::kNo);
}

std::uintptr_t native_cuda_stream(Stream& stream) {
  return reinterpret_cast<std::uintptr_t>(native_of(stream));
}

}  // namespace tandem::kernels
