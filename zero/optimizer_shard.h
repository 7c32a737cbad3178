// zero/optimizer_shard.h: what one rank keeps of an engine's optimizer: fp32 gradient sums, moments
// and master weights of its slices, and the step counts of all parameters.
//
// O1 Accumulators, moments and masters exist for the own slices only.
// O2 A parameter that is not in `seen` is not stepped, not decayed, and its count stands.
// O3 Nothing outside a parameter's own elements is read by norm or update: padding may hold
//    anything.
// O4 The update of an element depends on (its parameter's state, its gradient sum,
// scalars) only: the
//    same bits for every world size and bucket size.
// Thread safety: one call at a time. Fold targets are written by the plane's stream; norm and
// update are given to a stream that waits for the folds.
// Called by engine (the step).
#pragma once

#include "comm/group.h"
#include "kernels/device.h"
#include "kernels/powers.h"
#include "kernels/superaccumulator.h"
#include "kernels/update.h"
#include "zero/bucket_plan.h"
#include "zero/parameter_groups.h"
#include "zero/partition.h"
#include <tandem/options.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace tandem::zero {

class OptimizerShard {
 public:
  /// `plan`, `device` and `parameters_memory` (the engine's flat parameters on that device,
  /// BucketPlan::flat_bytes) outlive the shard. Masters are taken over from the parameters as they
  /// are when `stream` comes to it: call after the broadcast. kRemainder: for plans without fp16
  /// buckets. Throws std::bad_alloc, OutOfDeviceMemory.
  OptimizerShard(const BucketPlan& plan,
                 comm::Group group,
                 kernels::Device& device,
                 kernels::Stream& stream,
                 std::byte* parameters_memory,
                 ParameterGroups groups,
                 Masters masters);

  /// The own slice of a bucket's gradient sum, [slice_of(group, bucket.numel).numel()], for fold().
  /// Zero at the start; who folds says whether a window begins.
  [[nodiscard]] float* accumulator(std::int32_t bucket);
  [[nodiscard]] Range slice(std::int32_t bucket) const;

  /// What a rank owns of a parameter.
  struct Piece {
    Range within;                 // of the parameter's elements
    const float* data = nullptr;  // the own gradient sum; null for other ranks' pieces
  };
  [[nodiscard]] Piece piece(comm::Group group, std::int32_t parameter) const;

  /// Sums the squares of the own elements of seen parameters, or their powers: raw sums, before any
  /// factor. `seen`: per parameter.
  void sum_squares(kernels::Stream& stream, const std::vector<bool>& seen);
  void sum_powers(kernels::Stream& stream,
                  const std::vector<bool>& seen,
                  const kernels::Power& power);
  /// Adds what the last of these found, once a mark recorded after it is complete.
  void add_sum_to(kernels::Superaccumulator& sum) const { table_->add_sum_to(sum); }
  /// Finds the largest magnitude of those elements, in the same way; kernels/powers.h.
  void find_largest(kernels::Stream& stream, const std::vector<bool>& seen);
  [[nodiscard]] std::uint32_t largest() const { return table_->largest(); }

  /// Opens an update: counts one step for every seen parameter and fixes the scalars.
  /// `grad_factor`: multiplier / denominator * clip, once, in fp32.
  void begin_update(kernels::Stream& stream, const std::vector<bool>& seen, double grad_factor);
  /// Updates the own fragments of one bucket in place. Between begin_update and the next one, once
  /// a bucket. Unseen parameters are skipped.
  void update(kernels::Stream& stream, std::int32_t bucket) { table_->update(stream, bucket); }

  /// Settings that later updates use.
  [[nodiscard]] ParameterGroups& groups() { return groups_; }
  [[nodiscard]] const ParameterGroups& groups() const { return groups_; }
  [[nodiscard]] std::int64_t step_count(std::int32_t parameter) const;

  // Of this rank, padding of its slices included.
  [[nodiscard]] std::size_t gradient_bytes() const;  // accumulators
  [[nodiscard]] std::size_t moment_bytes() const;
  [[nodiscard]] std::size_t master_bytes() const;

 private:
  struct Fragment {  // a piece of one parameter in the own slice of a bucket
    std::int32_t parameter = 0;
    std::int32_t bucket = 0;
    std::int64_t bucket_offset = 0;   // elements, from the bucket's start
    std::int64_t shard_offset = 0;    // elements, in accumulators and moments
    std::int64_t master_offset = -1;  // elements, in masters or remainders; -1 for fp32
    std::int64_t numel = 0;
  };
  struct BucketShard {
    Range slice;
    std::int64_t shard_offset = 0;
  };

  [[nodiscard]] std::vector<bool> fragments_of(const std::vector<bool>& seen) const;
  void cut_into_fragments(std::int32_t bucket, std::int64_t master_offset);
  [[nodiscard]] std::byte* parameter_data(const Fragment& fragment) const;
  [[nodiscard]] kernels::UpdateArrays arrays_of(const Fragment& fragment) const;
  void take_masters(kernels::Device& device, kernels::Stream& stream);

  const BucketPlan& plan_;
  std::byte* parameters_;
  ParameterGroups groups_;
  std::vector<BucketShard> buckets_;
  std::vector<Fragment> fragments_;        // by bucket and offset
  std::vector<std::int64_t> step_counts_;  // per parameter
  kernels::DeviceArray<float> accumulators_;
  std::array<kernels::DeviceArray<float>, kernels::kMaxStates>
      states_;                           // as many as any group's optimizer keeps
  kernels::DeviceArray<float> masters_;  // either of these two
  kernels::DeviceArray<std::uint16_t> remainders_;
  std::unique_ptr<kernels::FragmentTable> table_;
};

}  // namespace tandem::zero
