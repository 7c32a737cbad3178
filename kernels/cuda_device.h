// kernels/cuda_device.h: one NVIDIA GPU as a device, without a word of CUDA's headers.
//
// G1 Calls leave the calling thread's current CUDA device as it was; a thread that has used none
//    may find the device of the call made current.
// G2 Nothing here waits for the whole device. allocate() waits for its own zeros, and freeing
//    device memory, CUDA being as it is, for work that is under way.
// G3 A build without CUDA has the same functions: cuda_built() is false, cuda_device_count() 0, and
//    the others throw DeviceError saying how to build with it.
// Thread safety: any thread. Called by comm (native streams for NCCL), zero and engine.
#pragma once

#include "kernels/device.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tandem::kernels {

/// Whether this library was compiled with CUDA.
[[nodiscard]] bool cuda_built();

/// GPUs that this process may use; 0 where there is no driver or it is too old. Never throws.
[[nodiscard]] int cuda_device_count() noexcept;

/// The GPU with that number. Throws DeviceError: no such GPU, no driver, not usable.
/// Memory, streams and tables made of a device may be destroyed after it; marks may be read.
/// `make_room` is called once where memory is full, before an allocation is tried again: whoever
/// keeps free memory of the same GPU (LibTorch's cache) gives it back there.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(int index,
                                                       std::function<void()> make_room = nullptr);

/// Makes a GPU current on the calling thread until the result is destroyed, there (G1). Throws
/// DeviceError.
[[nodiscard]] std::shared_ptr<void> make_cuda_current(int index);

/// "GPU-<uuid> at <PCI bus id>": the same for two processes only if they use one GPU, or one
/// instance of a partitioned one. Throws DeviceError.
[[nodiscard]] std::string cuda_device_identity(int index);

/// A stream of the caller's, a cudaStream_t (0: the default stream), as a stream of `device`, which
/// is a CUDA device. Not owned: it outlives the object.
[[nodiscard]] std::unique_ptr<Stream> wrap_cuda_stream(Device& device, std::uintptr_t native);

/// The cudaStream_t of a stream of a CUDA device. Throws DeviceError if it is of another kind.
[[nodiscard]] std::uintptr_t native_cuda_stream(Stream& stream);

}  // namespace tandem::kernels
