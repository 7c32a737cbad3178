// kernels/cuda/nvtx.cpp: kernels/nvtx.h by NVTX 3, which is headers only and finds a profiler, if
// one is attached, at its first call.
#include "kernels/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace tandem::kernels {

ProfilerRange::ProfilerRange(const char* name) noexcept { nvtxRangePushA(name); }
ProfilerRange::~ProfilerRange() { nvtxRangePop(); }

std::uint64_t begin_profiler_range(const char* name) noexcept { return nvtxRangeStartA(name); }
void end_profiler_range(std::uint64_t range) noexcept { nvtxRangeEnd(range); }

}  // namespace tandem::kernels
