// zero/optimizer_shard.cpp: fragments of a rank's slices, their norm and their update.
#include "zero/optimizer_shard.h"

#include "kernels/check.h"
#include "kernels/norm.h"
#include "zero/update_rule.h"

#include <algorithm>
#include <utility>

namespace tandem::zero {
namespace {

// A fragment is at most this long, so that a device may deal fragments to its workers as they are.
constexpr std::int64_t kFragmentNumel = 64 * kBlock;

static_assert(kBlock == kernels::kNormBlock, "P2: no norm block straddles two slices");

}  // namespace

OptimizerShard::OptimizerShard(const BucketPlan& plan,
                               comm::Group group,
                               kernels::Device& device,
                               kernels::Stream& stream,
                               std::byte* parameters_memory,
                               ParameterGroups groups,
                               Masters masters)
    : plan_(plan),
      parameters_(parameters_memory),
      groups_(std::move(groups)),
      step_counts_(plan.bucket_of.size(), 0) {
  std::int64_t shard_numel = 0;
  std::int64_t master_numel = 0;
  std::vector<std::size_t> bucket_ends;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketLayout& bucket = plan.buckets[b];
    const Range slice = slice_of(group, bucket.numel);
    buckets_.push_back({slice, shard_numel});
    const bool has_masters = bucket.dtype != kernels::Dtype::kFloat32;
    TANDEM_ASSERT(masters == Masters::kSeparate || bucket.dtype != kernels::Dtype::kFloat16,
                  "only bf16 has remainders");
    cut_into_fragments(static_cast<std::int32_t>(b), has_masters ? master_numel : -1);
    bucket_ends.push_back(fragments_.size());
    shard_numel += slice.numel();
    if (has_masters) master_numel += slice.numel();
  }

  accumulators_ = {device, shard_numel};
  int states = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    states = std::max(states, states_of(groups_.settings(g)));
  }
  const float initial = initial_state(groups_.settings(0));
  for (int k = 0; k < states; ++k) {
    kernels::DeviceArray<float>& state = states_[static_cast<std::size_t>(k)];
    state = {device, shard_numel};
    if (initial != 0.0F) device.fill(stream, state.data(), initial, state.numel());
  }
  if (masters == Masters::kSeparate) {
    masters_ = {device, master_numel};
    take_masters(device, stream);
  } else {
    remainders_ = {device, master_numel};  // a bf16 value has none
  }
  std::vector<kernels::UpdateArrays> arrays;
  arrays.reserve(fragments_.size());
  for (const Fragment& fragment : fragments_) arrays.push_back(arrays_of(fragment));
  table_ = device.make_table(std::move(arrays), std::move(bucket_ends));
}

void OptimizerShard::cut_into_fragments(std::int32_t bucket, std::int64_t master_offset) {
  const BucketShard& shard = buckets_.back();
  for (const Placement& placement : plan_.buckets[static_cast<std::size_t>(bucket)].placements) {
    const std::int64_t end = std::min(placement.offset + placement.numel, shard.slice.end);
    std::int64_t begin = std::max(placement.offset, shard.slice.begin);
    for (; begin < end; begin += kFragmentNumel) {
      TANDEM_ASSERT((begin - placement.offset) % kBlock == 0, "B2, P2: whole norm blocks");
      const std::int64_t in_slice = begin - shard.slice.begin;
      fragments_.push_back({placement.parameter, bucket, begin, shard.shard_offset + in_slice,
                            master_offset < 0 ? -1 : master_offset + in_slice,
                            std::min(kFragmentNumel, end - begin)});
    }
  }
}

float* OptimizerShard::accumulator(std::int32_t bucket) {
  return accumulators_.data() + buckets_[static_cast<std::size_t>(bucket)].shard_offset;
}

Range OptimizerShard::slice(std::int32_t bucket) const {
  return buckets_[static_cast<std::size_t>(bucket)].slice;
}

OptimizerShard::Piece OptimizerShard::piece(comm::Group group, std::int32_t parameter) const {
  const auto b = static_cast<std::size_t>(plan_.bucket_of[static_cast<std::size_t>(parameter)]);
  const BucketLayout& bucket = plan_.buckets[b];
  const auto placement =
      std::find_if(bucket.placements.begin(), bucket.placements.end(),
                   [&](const Placement& one) { return one.parameter == parameter; });
  const Range slice = slice_of(group, bucket.numel);
  const std::int64_t begin = std::max(placement->offset, slice.begin);
  const std::int64_t end =
      std::max(begin, std::min(placement->offset + placement->numel, slice.end));
  Piece piece;
  piece.within = {begin - placement->offset, end - placement->offset};
  if (slice == buckets_[b].slice && begin < end) {
    piece.data = accumulators_.data() + buckets_[b].shard_offset + (begin - slice.begin);
  }
  return piece;
}

std::vector<bool> OptimizerShard::fragments_of(const std::vector<bool>& seen) const {
  TANDEM_ASSERT(seen.size() == step_counts_.size(), "seen has a flag for every parameter");
  std::vector<bool> chosen(fragments_.size());
  for (std::size_t f = 0; f < chosen.size(); ++f) {
    chosen[f] = seen[static_cast<std::size_t>(fragments_[f].parameter)];
  }
  return chosen;
}

void OptimizerShard::sum_squares(kernels::Stream& stream, const std::vector<bool>& seen) {
  table_->sum_squares(stream, fragments_of(seen));
}

void OptimizerShard::sum_powers(kernels::Stream& stream,
                                const std::vector<bool>& seen,
                                const kernels::Power& power) {
  table_->sum_powers(stream, fragments_of(seen), power);
}

void OptimizerShard::find_largest(kernels::Stream& stream, const std::vector<bool>& seen) {
  table_->find_largest(stream, fragments_of(seen));
}

void OptimizerShard::begin_update(kernels::Stream& stream,
                                  const std::vector<bool>& seen,
                                  double grad_factor) {
  TANDEM_ASSERT(seen.size() == step_counts_.size(), "seen has a flag for every parameter");
  const auto factor = static_cast<float>(grad_factor);
  for (std::size_t p = 0; p < seen.size(); ++p) {
    if (seen[p]) ++step_counts_[p];
  }
  // Nearly all parameters of a group have taken the same number of steps: two powers once a group,
  // not per parameter, also where weights and biases of different groups take turns.
  struct Latest {
    std::int64_t step = 0;
    std::int32_t rule = kernels::UpdateRules::kSkip;
  };
  std::vector<Latest> latest(groups_.size());
  kernels::UpdateRules rules;
  rules.rule_of.assign(fragments_.size(), kernels::UpdateRules::kSkip);
  for (std::size_t f = 0; f < fragments_.size(); ++f) {
    const auto parameter = static_cast<std::size_t>(fragments_[f].parameter);
    if (!seen[parameter]) continue;
    const std::size_t group = groups_.group_of(parameter);
    Latest& of_group = latest[group];
    if (of_group.step != step_counts_[parameter]) {
      of_group = {step_counts_[parameter], static_cast<std::int32_t>(rules.rules.size())};
      rules.rules.push_back(update_at(groups_.settings(group), of_group.step, factor));
    }
    rules.rule_of[f] = of_group.rule;
  }
  table_->set_rules(stream, std::move(rules));
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

void OptimizerShard::take_masters(kernels::Device& device, kernels::Stream& stream) {
  for (const Fragment& fragment : fragments_) {
    if (fragment.master_offset < 0) continue;
    device.widen(stream, masters_.data() + fragment.master_offset, parameter_data(fragment),
                 plan_.buckets[static_cast<std::size_t>(fragment.bucket)].dtype, fragment.numel);
  }
}

std::int64_t OptimizerShard::step_count(std::int32_t parameter) const {
  return step_counts_[static_cast<std::size_t>(parameter)];
}

std::size_t OptimizerShard::gradient_bytes() const { return accumulators_.bytes(); }
std::size_t OptimizerShard::moment_bytes() const {
  std::size_t bytes = 0;
  for (const kernels::DeviceArray<float>& state : states_) bytes += state.bytes();
  return bytes;
}
std::size_t OptimizerShard::master_bytes() const { return masters_.bytes() + remainders_.bytes(); }

}  // namespace tandem::zero
