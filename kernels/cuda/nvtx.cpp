// kernels/cuda/nvtx.cpp: kernels/nvtx.h by NVTX 3, which is headers only and finds a profiler, if
// one is attached, at its first call.
#include "kernels/nvtx.h"

#include <nvtx3/nvToolsExt.h>

namespace tandem::kernels {

ProfilerRange::ProfilerRange(const char* name) noexcept { nvtxRangePushA(name); }
ProfilerRange::~ProfilerRange() { nvtxRangePop(); }

}  // namespace tandem::kernels
