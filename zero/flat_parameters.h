// zero/flat_parameters.h: an engine's parameters as views into flat buckets.
//
// L1 Each parameter is a contiguous view of its bucket's memory at its planned offset; the memory
// lives
//    as long as any tensor over it.
// L2 Our writes bump the tensors' versions (touch()), so that a stale graph is an error and not a
// wrong
//    gradient.
// L3 Padding between parameters is zero at the start and never read as a parameter.
// Called by engine.
#pragma once

#include "zero/bucket_plan.h"
#include "zero/torch_device.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace tandem::zero {

/// Who fills the memory.
enum class Fill : std::uint8_t {
  kCopy,   // this rank, from its tensors
  kLeave,  // another rank of the node, whose memory it is: the tensors' values are dropped
};

class FlatParameters {
 public:
  /// Copies each tensor's values to its place in `memory` (see Fill) and turns the tensor into a
  /// view of it (shape kept, contiguous). Tensors are leaves on `device` with the plan's dtypes.
  FlatParameters(const BucketPlan& plan,
                 const TorchDevice& device,
                 std::shared_ptr<std::byte> memory,
                 std::vector<at::Tensor> tensors,
                 Fill fill = Fill::kCopy);
  ~FlatParameters();
  FlatParameters(const FlatParameters&) = delete;
  FlatParameters& operator=(const FlatParameters&) = delete;
  FlatParameters(FlatParameters&&) = delete;
  FlatParameters& operator=(FlatParameters&&) = delete;

  /// Index of the first parameter whose tensor no longer lies where it was put (torch::load,
  /// to(dtype), set_data), or -1.
  [[nodiscard]] std::int32_t first_moved() const;
  /// Copies moved tensors of the same shape and dtype back into their places and re-views them;
  /// returns whether there were any. Throws InvalidArgument naming a parameter whose type or shape
  /// changed.
  bool restore_moved(const std::string& engine, const std::vector<ParameterInfo>& infos);
  /// Bumps the version of every parameter flagged in `changed`.
  void touch(const std::vector<bool>& changed);

  [[nodiscard]] const std::vector<at::Tensor>& tensors() const;
  [[nodiscard]] std::byte* bucket(std::int32_t index) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::zero
