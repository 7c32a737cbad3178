// kernels/cuda/errors.h: CUDA's errors as DeviceError, and the current device of the calling
// thread. Called by everything in kernels/cuda.
#pragma once

#include "kernels/stream.h"

#include <cuda_runtime_api.h>

#include <new>

namespace tandem::kernels::cuda {

/// Throws DeviceError (OutOfDeviceMemory for its error) for anything but success: the call, CUDA's
/// words for it, and what to do. Nothing is left for the next caller of cudaGetLastError().
void check(cudaError_t error, const char* call);

/// For destructors: forgets the error. The runtime may be shutting down, or the device have failed:
/// whoever waits for work there is told.
void ignore(cudaError_t error) noexcept;

/// Makes a device current for a scope (G1 of kernels/cuda_device.h).
class CurrentDevice {
 public:
  /// Throws DeviceError.
  explicit CurrentDevice(int device);
  /// For destructors: where the device cannot be made current, nothing happens.
  CurrentDevice(int device, std::nothrow_t /*tag*/) noexcept;
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  CurrentDevice(CurrentDevice&&) = delete;
  CurrentDevice& operator=(CurrentDevice&&) = delete;

 private:
  int before_ = -1;  // to go back to; -1: nothing to do
};

}  // namespace tandem::kernels::cuda
