// engine/gpu.h: the GPUs of this machine, and LibTorch's library for them.
//
// Programs link LibTorch's CPU library; the other one, of a gigabyte and more, is opened when a GPU
// is asked for.
// Called by engine (lanes, World).
#pragma once

#include <string>

namespace tandem::engine {

[[nodiscard]] bool cuda_is_built();

/// The device that rank number `local` of its node trains on: ranks take turns if there are fewer.
/// Loads LibTorch's CUDA library if the program has not. Throws DeviceError saying what is missing.
[[nodiscard]] int gpu_of_local_rank(int local);

/// The same for two devices if they are one GPU. Throws kernels::DeviceError.
[[nodiscard]] std::string gpu_identity(int index);

}  // namespace tandem::engine
