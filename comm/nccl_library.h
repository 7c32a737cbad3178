// comm/nccl_library.h: the real NCCL, where this build has it.
// Called by engine (World).
#pragma once

#include "comm/nccl.h"

#include <memory>

namespace tandem::comm {

/// For communicators of CUDA device `device_index`. Throws DeviceError in a build without CUDA.
[[nodiscard]] std::unique_ptr<Nccl> make_nccl_library(int device_index);

}  // namespace tandem::comm
