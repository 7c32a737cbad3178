#include "kernels/cuda/errors.h"

#include <cuda.h>

#include <string>

namespace tandem::kernels::cuda {
namespace {

/// What to do about an error, or "".
const char* advice_for(cudaError_t error) {
  switch (error) {
    case cudaErrorNoDevice:
      return ": no GPU is visible to this process; see nvidia-smi and CUDA_VISIBLE_DEVICES";
    case cudaErrorInsufficientDriver:
      return ": no driver is installed, or one older than this CUDA; see nvidia-smi";
    case cudaErrorInvalidDevice:
      return ": there is no GPU of that number; see cuda_device_count()";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return ": compiled for other GPUs than this one; build with its architecture in "
             "TANDEM_CUDA_ARCHITECTURES";
    case cudaErrorDevicesUnavailable:
      return ": another process has the GPU for itself; see nvidia-smi";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
      return ": the GPU is lost to this process, by this or an earlier call; restart it from the "
             "last checkpoint";
    default:
      return "";
  }
}

using PrimaryContextState = CUresult (*)(CUdevice, unsigned*, int*);

PrimaryContextState find_primary_context_state() noexcept {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuDevicePrimaryCtxGetState", &function, 12000, cudaEnableDefault, &found);
  ignore(error);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PrimaryContextState>(function);
}

/// Whether this process uses the device. To make another one current would make a context there:
/// some hundred megabytes on GPU 0 for each rank, because threads begin with 0 as their device.
bool in_use(int device) noexcept {
  static const PrimaryContextState state = find_primary_context_state();
  unsigned flags = 0;
  int active = 0;
  return state != nullptr && state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

/// `before` is set where it is another device.
cudaError_t make_current(int device, int& before) noexcept {
  int now = -1;
  cudaError_t error = cudaGetDevice(&now);
  if (error != cudaSuccess || now == device) return error;
  error = cudaSetDevice(device);
  if (error == cudaSuccess) before = now;
  return error;
}

}  // namespace

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  ignore(error);
  const std::string text = std::string(call) + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")" + advice_for(error);
  if (error == cudaErrorMemoryAllocation) throw OutOfDeviceMemory(text);
  throw DeviceError(text);
}

void ignore(cudaError_t error) noexcept {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
}

CurrentDevice::CurrentDevice(int device) { check(make_current(device, before_), "cudaSetDevice"); }

CurrentDevice::CurrentDevice(int device, std::nothrow_t /*tag*/) noexcept {
  ignore(make_current(device, before_));
}

CurrentDevice::~CurrentDevice() {
  if (before_ >= 0 && in_use(before_)) ignore(cudaSetDevice(before_));
}

}  // namespace tandem::kernels::cuda
