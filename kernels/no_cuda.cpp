// kernels/no_cuda.cpp: kernels/cuda_device.h and kernels/nvtx.h in a build without CUDA (G3).
#include "kernels/cuda_device.h"
#include "kernels/nvtx.h"

namespace tandem::kernels {
namespace {

[[noreturn]] void refuse(const char* call) {
  throw DeviceError(std::string(call) + ": built without CUDA: configure with TANDEM_CUDA=ON");
}

}  // namespace

bool cuda_built() { return false; }

int cuda_device_count() noexcept { return 0; }

std::unique_ptr<Device> make_cuda_device(int index, std::function<void()> /*make_room*/) {
  refuse(("cuda:" + std::to_string(index)).c_str());
}

std::shared_ptr<void> make_cuda_current(int index) {
  refuse(("cuda:" + std::to_string(index)).c_str());
}

std::string cuda_device_identity(int index) { refuse(("cuda:" + std::to_string(index)).c_str()); }

std::unique_ptr<Stream> wrap_cuda_stream(Device& /*device*/, std::uintptr_t /*native*/) {
  refuse("wrap_cuda_stream");
}

std::uintptr_t native_cuda_stream(Stream& /*stream*/) { refuse("native_cuda_stream"); }

ProfilerRange::ProfilerRange(const char* /*name*/) noexcept {}
ProfilerRange::~ProfilerRange() = default;
std::uint64_t begin_profiler_range(const char* /*name*/) noexcept { return 0; }
void end_profiler_range(std::uint64_t /*range*/) noexcept {}

}  // namespace tandem::kernels
