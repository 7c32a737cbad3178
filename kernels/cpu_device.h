// kernels/cpu_device.h: the CPU as a device: its streams are immediate, its memory is the host's.
// Called by engine (World) and by kernels/simulated_device.
#pragma once

#include "kernels/device.h"

#include <cstdint>
#include <functional>
#include <memory>

namespace tandem::kernels {

/// Runs body(begin, end) over pieces of [0, count), in parallel or not; every index exactly once.
using ParallelFor =
    std::function<void(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>&)>;

/// Norms and updates are spread by `parallel`; everything else runs on the calling thread. Large
/// arrays are asked for in huge pages, which made the update about 12 % faster; the system may
/// decline, and nothing else changes then.
[[nodiscard]] std::unique_ptr<Device> make_cpu_device(ParallelFor parallel);
/// All on the calling thread.
[[nodiscard]] std::unique_ptr<Device> make_cpu_device();

}  // namespace tandem::kernels
