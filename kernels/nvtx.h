// kernels/nvtx.h: named ranges on the host's timeline in NVIDIA's profilers.
//
// The calls are functions of the library, not inline code behind a macro, so that no room is
// compiled differently with CUDA. Without CUDA they are empty; with it and no profiler attached
// each reads one pointer. Ranges are put around passes, buckets and steps, never inside loops.
// Called by engine.
#pragma once

#include <cstdint>

namespace tandem::kernels {

/// From here to the end of the scope, on the calling thread. `name` ends with 0 and is not kept.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) noexcept;
  ~ProfilerRange();  // NOLINT(performance-trivially-destructible): not with CUDA
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
  ProfilerRange(ProfilerRange&&) = delete;
  ProfilerRange& operator=(ProfilerRange&&) = delete;
};

/// The same for what begins on one thread and may end on another, as a backward pass does.
[[nodiscard]] std::uint64_t begin_profiler_range(const char* name) noexcept;
void end_profiler_range(std::uint64_t range) noexcept;

}  // namespace tandem::kernels
