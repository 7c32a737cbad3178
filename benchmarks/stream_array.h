// benchmarks/stream_array.h: large arrays as the library keeps them: huge pages where it may have
// them, zeros at the start.
#pragma once

#include "kernels/cpu_device.h"

#include <cstdint>

namespace tandem::benchmarks {

template <class Number>
kernels::DeviceArray<Number> stream_array(std::int64_t numel) {
  return {*kernels::make_cpu_device(), numel};  // host memory outlives its device
}

}  // namespace tandem::benchmarks
