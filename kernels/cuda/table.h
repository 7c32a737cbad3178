// kernels/cuda/table.h: the fragments of an optimizer shard on a GPU (FragmentTable of
// kernels/device.h). Called by kernels/cuda/device.cpp.
#pragma once

#include "kernels/cuda/streams.h"
#include "kernels/device.h"

#include <cstddef>
#include <memory>
#include <vector>

namespace tandem::kernels::cuda {

/// Waits until the table is on the device. Throws DeviceError, OutOfDeviceMemory.
[[nodiscard]] std::unique_ptr<FragmentTable> make_table(const SharedPtr& shared,
                                                        const std::vector<UpdateArrays>& fragments,
                                                        std::vector<std::size_t> bucket_ends);

}  // namespace tandem::kernels::cuda
