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
// Thread safety: fold targets are written by the queue; norm and update run after the queue is
// done. update() of different buckets may run in parallel; all other calls come one at a time.
// Called by engine (the step).
#pragma once

#include "comm/group.h"
#include "kernels/superaccumulator.h"
#include "kernels/update.h"
#include "zero/bucket_plan.h"
#include "zero/parameter_groups.h"
#include "zero/partition.h"
#include "zero/stream_array.h"
#include <tandem/options.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace tandem::zero {

/// Runs body(begin, end) over pieces of [0, count), in parallel or not; every index exactly once.
using ParallelFor =
    std::function<void(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>&)>;

class OptimizerShard {
 public:
  /// `plan` and `parameters_memory` (the engine's flat parameters, BucketPlan::flat_bytes) outlive
  /// the shard. Masters are taken over from the parameters as they are now: call after the
  /// broadcast. kRemainder: for plans without fp16 buckets. Throws std::bad_alloc.
  OptimizerShard(const BucketPlan& plan,
                 comm::Group group,
                 std::byte* parameters_memory,
                 ParameterGroups groups,
                 Masters masters);

  /// The own slice of a bucket's gradient sum, [slice_of(group, bucket.numel).numel()], for fold().
  /// Zero at the start; who folds says whether a window begins.
  [[nodiscard]] float* accumulator(std::int32_t bucket);
  [[nodiscard]] Range slice(std::int32_t bucket) const;

  /// Adds the squares of the own elements of seen parameters: raw sums, before any factor.
  /// `seen`: per parameter.
  void add_sum_of_squares(const std::vector<bool>& seen,
                          kernels::Superaccumulator& sum,
                          const ParallelFor& parallel) const;

  /// Opens an update: counts one step for every seen parameter and fixes the scalars.
  /// `grad_factor`: multiplier / denominator * clip, once, in fp32.
  void begin_update(const std::vector<bool>& seen, double grad_factor);
  /// Updates the own fragments of one bucket in place. Between begin_update and the next one, once
  /// a bucket. Unseen parameters are skipped.
  void update(std::int32_t bucket, const ParallelFor& parallel);

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
    std::size_t task_begin = 0;  // in task_starts_
    std::size_t task_end = 0;
  };

  void cut_into_fragments(std::int32_t bucket, std::int64_t master_offset);
  [[nodiscard]] std::span<const Fragment> fragments_of(std::size_t task_begin,
                                                       std::size_t task_end) const;
  [[nodiscard]] std::byte* parameter_data(const Fragment& fragment) const;
  [[nodiscard]] kernels::UpdateArrays arrays_of(const Fragment& fragment) const;
  void take_masters();

  const BucketPlan& plan_;
  std::byte* parameters_;
  ParameterGroups groups_;
  std::vector<BucketShard> buckets_;
  std::vector<Fragment> fragments_;  // by bucket and offset
  // Fragments are worked on in tasks of about equal cost: task t is [task_starts_[t],
  // task_starts_[t + 1]).
  std::vector<std::size_t> task_starts_;
  std::vector<std::int64_t> step_counts_;  // per parameter
  std::vector<bool> seen_;                 // of the open update
  float grad_factor_ = 1.0F;
  StreamArray<float> accumulators_;
  std::array<StreamArray<float>, kernels::kMaxStates>
      states_;                  // as many as any group's optimizer keeps
  StreamArray<float> masters_;  // either of these two
  StreamArray<std::uint16_t> remainders_;
};

}  // namespace tandem::zero
