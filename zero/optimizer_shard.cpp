// zero/optimizer_shard.cpp: fragments of a rank's slices, their norm and their update.
#include "zero/optimizer_shard.h"

#include "kernels/bf16.h"
#include "kernels/check.h"
#include "kernels/fp16.h"
#include "kernels/norm.h"
#include "zero/update_rule.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace tandem::zero {
namespace {

// A fragment is at most this long and a task costs about as much: some ten microseconds, long
// against handing it to a thread, short against a bucket. A multiple of the norm's block.
constexpr std::int64_t kTaskNumel = 64 * kBlock;
// What a fragment costs besides its elements, in elements: thousands of scalars are work, too.
constexpr std::int64_t kFragmentCost = 32;

/// What one update number of a group does to an element.
struct Rule {
  std::int64_t step = 0;
  kernels::Update update;
};

static_assert(kBlock == kernels::kNormBlock, "P2: no norm block straddles two slices");

}  // namespace

OptimizerShard::OptimizerShard(const BucketPlan& plan,
                               comm::Group group,
                               std::byte* parameters_memory,
                               ParameterGroups groups,
                               Masters masters)
    : plan_(plan),
      parameters_(parameters_memory),
      groups_(std::move(groups)),
      step_counts_(plan.bucket_of.size(), 0),
      seen_(plan.bucket_of.size(), false) {
  std::int64_t shard_numel = 0;
  std::int64_t master_numel = 0;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketLayout& bucket = plan.buckets[b];
    const Range slice = slice_of(group, bucket.numel);
    buckets_.push_back({slice, shard_numel, task_starts_.size(), 0});
    const bool has_masters = bucket.dtype != kernels::Dtype::kFloat32;
    TANDEM_ASSERT(masters == Masters::kSeparate || bucket.dtype != kernels::Dtype::kFloat16,
                  "only bf16 has remainders");
    cut_into_fragments(static_cast<std::int32_t>(b), has_masters ? master_numel : -1);
    buckets_.back().task_end = task_starts_.size();
    shard_numel += slice.numel();
    if (has_masters) master_numel += slice.numel();
  }
  task_starts_.push_back(fragments_.size());

  accumulators_ = StreamArray<float>(shard_numel);
  int states = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    states = std::max(states, states_of(groups_.settings(g)));
  }
  const float initial = initial_state(groups_.settings(0));
  for (int k = 0; k < states; ++k) {
    StreamArray<float>& state = states_[static_cast<std::size_t>(k)];
    state = StreamArray<float>(shard_numel);
    if (initial != 0.0F) std::fill_n(state.data(), state.numel(), initial);
  }
  if (masters == Masters::kSeparate) {
    masters_ = StreamArray<float>(master_numel);
    take_masters();
  } else {
    remainders_ = StreamArray<std::uint16_t>(master_numel);  // a bf16 value has none
  }
}

void OptimizerShard::cut_into_fragments(std::int32_t bucket, std::int64_t master_offset) {
  const BucketShard& shard = buckets_.back();
  std::int64_t task_cost = kTaskNumel;  // full: the first fragment opens a task
  for (const Placement& placement : plan_.buckets[static_cast<std::size_t>(bucket)].placements) {
    const std::int64_t end = std::min(placement.offset + placement.numel, shard.slice.end);
    std::int64_t begin = std::max(placement.offset, shard.slice.begin);
    for (; begin < end; begin += kTaskNumel) {
      TANDEM_ASSERT((begin - placement.offset) % kBlock == 0, "B2, P2: whole norm blocks");
      const std::int64_t in_slice = begin - shard.slice.begin;
      const std::int64_t numel = std::min(kTaskNumel, end - begin);
      if (task_cost + numel > kTaskNumel) {
        task_starts_.push_back(fragments_.size());
        task_cost = 0;
      }
      task_cost += numel + kFragmentCost;
      fragments_.push_back({placement.parameter, bucket, begin, shard.shard_offset + in_slice,
                            master_offset < 0 ? -1 : master_offset + in_slice, numel});
    }
  }
}

float* OptimizerShard::accumulator(std::int32_t bucket) {
  return accumulators_.data() + buckets_[static_cast<std::size_t>(bucket)].shard_offset;
}

Range OptimizerShard::slice(std::int32_t bucket) const {
  return buckets_[static_cast<std::size_t>(bucket)].slice;
}

std::span<const OptimizerShard::Fragment> OptimizerShard::fragments_of(std::size_t task_begin,
                                                                       std::size_t task_end) const {
  const std::size_t begin = task_starts_[task_begin];
  return std::span(fragments_).subspan(begin, task_starts_[task_end] - begin);
}

void OptimizerShard::add_sum_of_squares(const std::vector<bool>& seen,
                                        kernels::Superaccumulator& sum,
                                        const ParallelFor& parallel) const {
  TANDEM_ASSERT(seen.size() == step_counts_.size(), "seen has a flag for every parameter");
  const auto tasks = static_cast<std::int64_t>(task_starts_.size()) - 1;
  if (tasks == 0) return;
  std::mutex mutex;  // guards `sum`; the sums are exact, so the order of merging does not matter
  parallel(tasks, [&](std::int64_t begin, std::int64_t end) {
    kernels::Superaccumulator own;
    for (const Fragment& fragment :
         fragments_of(static_cast<std::size_t>(begin), static_cast<std::size_t>(end))) {
      if (!seen[static_cast<std::size_t>(fragment.parameter)]) continue;
      kernels::add_sum_of_squares(accumulators_.data() + fragment.shard_offset, fragment.numel,
                                  own);
    }
    const std::lock_guard lock(mutex);
    sum.merge(own);
  });
}

void OptimizerShard::begin_update(const std::vector<bool>& seen, double grad_factor) {
  TANDEM_ASSERT(seen.size() == step_counts_.size(), "seen has a flag for every parameter");
  seen_ = seen;
  grad_factor_ = static_cast<float>(grad_factor);
  for (std::size_t i = 0; i < seen_.size(); ++i) {
    if (seen_[i]) ++step_counts_[i];
  }
}

void OptimizerShard::update(std::int32_t bucket, const ParallelFor& parallel) {
  const BucketShard& shard = buckets_[static_cast<std::size_t>(bucket)];
  const auto tasks = static_cast<std::int64_t>(shard.task_end - shard.task_begin);
  if (tasks == 0) return;
  parallel(tasks, [&](std::int64_t begin, std::int64_t end) {
    const std::span<const Fragment> fragments =
        fragments_of(shard.task_begin + static_cast<std::size_t>(begin),
                     shard.task_begin + static_cast<std::size_t>(end));
    // Nearly all parameters of a group have taken the same number of steps: two powers once a
    // group, not per parameter, also where weights and biases of different groups take turns.
    std::vector<Rule> rules(groups_.size());
    for (const Fragment& fragment : fragments) {
      const auto parameter = static_cast<std::size_t>(fragment.parameter);
      if (!seen_[parameter]) continue;
      const std::size_t group = groups_.group_of(parameter);
      Rule& rule = rules[group];
      if (step_counts_[parameter] != rule.step) {
        rule.step = step_counts_[parameter];
        rule.update = update_at(groups_.settings(group), rule.step, grad_factor_);
      }
      kernels::update(rule.update, arrays_of(fragment));
    }
  });
}

std::byte* OptimizerShard::parameter_data(const Fragment& fragment) const {
  const BucketLayout& bucket = plan_.buckets[static_cast<std::size_t>(fragment.bucket)];
  return parameters_ + bucket.flat_offset +
         fragment.bucket_offset * static_cast<std::int64_t>(kernels::bytes_of(bucket.dtype));
}

kernels::UpdateArrays OptimizerShard::arrays_of(const Fragment& fragment) const {
  kernels::UpdateArrays arrays;
  arrays.grad = accumulators_.data() + fragment.shard_offset;
  arrays.param = parameter_data(fragment);
  arrays.param_dtype = plan_.buckets[static_cast<std::size_t>(fragment.bucket)].dtype;
  if (fragment.master_offset >= 0 && remainders_.empty()) {
    arrays.master = masters_.data() + fragment.master_offset;
  } else if (fragment.master_offset >= 0) {
    arrays.remainder = remainders_.data() + fragment.master_offset;
  }
  for (std::size_t k = 0; k < states_.size(); ++k) {
    if (!states_[k].empty()) arrays.state[k] = states_[k].data() + fragment.shard_offset;
  }
  arrays.numel = fragment.numel;
  return arrays;
}

void OptimizerShard::take_masters() {
  for (const Fragment& fragment : fragments_) {
    if (fragment.master_offset < 0) continue;
    float* master = masters_.data() + fragment.master_offset;
    const auto convert = [&](const auto* source) {
      for (std::int64_t i = 0; i < fragment.numel; ++i) master[i] = kernels::to_float(source[i]);
    };
    const std::byte* source = parameter_data(fragment);
    if (plan_.buckets[static_cast<std::size_t>(fragment.bucket)].dtype ==
        kernels::Dtype::kBFloat16) {
      convert(reinterpret_cast<const kernels::Bf16*>(source));
    } else {
      convert(reinterpret_cast<const kernels::Fp16*>(source));
    }
  }
}

std::int64_t OptimizerShard::step_count(std::int32_t parameter) const {
  return step_counts_[static_cast<std::size_t>(parameter)];
}

std::size_t OptimizerShard::gradient_bytes() const { return accumulators_.bytes(); }
std::size_t OptimizerShard::moment_bytes() const {
  std::size_t bytes = 0;
  for (const StreamArray<float>& state : states_) bytes += state.bytes();
  return bytes;
}
std::size_t OptimizerShard::master_bytes() const { return masters_.bytes() + remainders_.bytes(); }

}  // namespace tandem::zero
