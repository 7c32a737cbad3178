// zero/optimizer_shard.cpp: fragments of a rank's slices, their norm and their update.
#include "zero/optimizer_shard.h"

#include "kernels/bf16.h"
#include "kernels/check.h"
#include "kernels/norm.h"

#include <algorithm>
#include <mutex>
#include <variant>

namespace tandem::zero {
namespace {

// A fragment is at most this long and a task costs about as much: some ten microseconds, long
// against handing it to a thread, short against a bucket. A multiple of the norm's block.
constexpr std::int64_t kTaskNumel = 64 * kBlock;
// What a fragment costs besides its elements, in elements: thousands of scalars are work, too.
constexpr std::int64_t kFragmentCost = 32;

static_assert(kBlock == kernels::kNormBlock, "P2: no norm block straddles two slices");

}  // namespace

OptimizerShard::OptimizerShard(const BucketPlan& plan,
                               comm::Group group,
                               std::byte* parameters_memory,
                               const Optimizer& optimizer)
    : plan_(plan),
      parameters_(parameters_memory),
      optimizer_(optimizer),
      step_counts_(plan.bucket_of.size(), 0),
      seen_(plan.bucket_of.size(), false) {
  check(optimizer_);
  std::int64_t shard_numel = 0;
  std::int64_t master_numel = 0;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketLayout& bucket = plan.buckets[b];
    const Range slice = slice_of(group, bucket.numel);
    buckets_.push_back({slice, shard_numel, task_starts_.size(), 0});
    const bool has_masters = bucket.dtype == kernels::Dtype::kBFloat16;
    cut_into_fragments(static_cast<std::int32_t>(b), has_masters ? master_numel : -1);
    buckets_.back().task_end = task_starts_.size();
    shard_numel += slice.numel();
    if (has_masters) master_numel += slice.numel();
  }
  task_starts_.push_back(fragments_.size());

  accumulators_ = FloatArray(shard_numel);
  masters_ = FloatArray(master_numel);
  const Sgd* sgd = std::get_if<Sgd>(&optimizer_);
  if (sgd == nullptr || sgd->momentum != 0.0) state0_ = FloatArray(shard_numel);
  if (sgd == nullptr) state1_ = FloatArray(shard_numel);
  reload_masters();
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
    if (const AdamW* adamw = std::get_if<AdamW>(&optimizer_)) {
      update_adamw(*adamw, fragments);
    } else {
      update_sgd(std::get<Sgd>(optimizer_), fragments);
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
  if (fragment.master_offset >= 0) arrays.master = masters_.data() + fragment.master_offset;
  if (!state0_.empty()) arrays.state[0] = state0_.data() + fragment.shard_offset;
  if (!state1_.empty()) arrays.state[1] = state1_.data() + fragment.shard_offset;
  arrays.numel = fragment.numel;
  return arrays;
}

void OptimizerShard::update_adamw(const AdamW& adamw, std::span<const Fragment> fragments) const {
  // Nearly all parameters have taken the same number of steps: two powers once, not per parameter.
  std::int64_t step_of_functor = 0;
  kernels::Update functor;
  for (const Fragment& fragment : fragments) {
    const auto parameter = static_cast<std::size_t>(fragment.parameter);
    if (!seen_[parameter]) continue;
    if (step_counts_[parameter] != step_of_functor) {
      step_of_functor = step_counts_[parameter];
      functor = kernels::AdamUpdate<true, false>::at_step(adamw.lr, adamw.beta1, adamw.beta2,
                                                          adamw.eps, adamw.weight_decay,
                                                          step_of_functor, grad_factor_);
    }
    kernels::update(functor, arrays_of(fragment));
  }
}

void OptimizerShard::update_sgd(const Sgd& sgd, std::span<const Fragment> fragments) const {
  for (const Fragment& fragment : fragments) {
    const auto parameter = static_cast<std::size_t>(fragment.parameter);
    if (!seen_[parameter]) continue;
    const std::int64_t step = step_counts_[parameter];
    kernels::Update functor = kernels::SgdUpdate<false, false>::at_step(
        sgd.lr, 0.0, 0.0, sgd.weight_decay, step, grad_factor_);
    if (!state0_.empty()) {
      functor = kernels::SgdUpdate<true, false>::at_step(sgd.lr, sgd.momentum, 0.0,
                                                         sgd.weight_decay, step, grad_factor_);
    }
    kernels::update(functor, arrays_of(fragment));
  }
}

void OptimizerShard::reload_masters() {
  for (const Fragment& fragment : fragments_) {
    if (fragment.master_offset < 0) continue;
    const auto* source = reinterpret_cast<const kernels::Bf16*>(parameter_data(fragment));
    float* master = masters_.data() + fragment.master_offset;
    for (std::int64_t i = 0; i < fragment.numel; ++i) master[i] = kernels::to_float(source[i]);
  }
}

void OptimizerShard::set_learning_rate(double lr) {
  Optimizer changed = optimizer_;
  std::visit([&](auto& settings) { settings.lr = lr; }, changed);
  check(changed);
  optimizer_ = changed;
}

void OptimizerShard::set_weight_decay(double weight_decay) {
  Optimizer changed = optimizer_;
  std::visit([&](auto& settings) { settings.weight_decay = weight_decay; }, changed);
  check(changed);
  optimizer_ = changed;
}

std::int64_t OptimizerShard::step_count(std::int32_t parameter) const {
  return step_counts_[static_cast<std::size_t>(parameter)];
}

std::size_t OptimizerShard::gradient_bytes() const { return accumulators_.bytes(); }
std::size_t OptimizerShard::moment_bytes() const { return state0_.bytes() + state1_.bytes(); }
std::size_t OptimizerShard::master_bytes() const { return masters_.bytes(); }

}  // namespace tandem::zero
