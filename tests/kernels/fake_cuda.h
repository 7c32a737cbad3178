// tests/kernels/fake_cuda.h: CUDA's runtime without a GPU: the functions that kernels/cuda calls,
// over threads with random delays, so that the host's side of the CUDA device (which event, which
// stream, which memory when) runs in a test. A program that links fake_cuda.cpp takes them from
// there instead of libcudart, and the kernels from fake_launches.cpp, which runs their bodies.
//
// Like the real one: copies and kernels happen later, in their stream's order; pageable memory is
// read before a copy returns; the default device of a thread is 0; a call makes a context on the
// current device; cudaErrorNotReady is left for the next cudaGetLastError().
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

namespace tandem::kernels::fake_cuda {

inline constexpr int kDevices = 2;

/// Runs `work` when `stream` comes to it.
void give(cudaStream_t stream, std::function<void()> work);

/// Whether a call has made a context on the device since the last forget_contexts().
[[nodiscard]] bool has_context(int device);
void forget_contexts();

/// The next call that can fail returns `error`.
void fail_next(cudaError_t error);

/// What was made and not given back.
struct Held {
  std::size_t allocations = 0;  // device and pinned
  std::size_t streams = 0;
  std::size_t events = 0;
  bool operator==(const Held&) const = default;
};
[[nodiscard]] Held held();

}  // namespace tandem::kernels::fake_cuda
