// tests/zero/shard_rig.h: all ranks' optimizer shards of one engine over one flat memory, and the
// plain unsharded loop that they must equal bit for bit.
//
// Padding of parameters and of gradient sums is poisoned with NaN before every use (O3).
#pragma once

#include "kernels/bf16.h"
#include "kernels/cpu_device.h"
#include "kernels/fp16.h"
#include "kernels/powers.h"
#include "kernels/superaccumulator.h"
#include "kernels/update.h"
#include "zero/optimizer_shard.h"
#include "zero/update_rule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

namespace tandem::zero {

using Values = std::vector<std::vector<float>>;  // per parameter, per element

inline void serially(std::int64_t count,
                     const std::function<void(std::int64_t, std::int64_t)>& body) {
  body(0, count);
}

/// Three threads and uneven pieces.
inline void in_threads(std::int64_t count,
                       const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t cuts[] = {0, count / 5, count / 5 + count / 2, count};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    if (cuts[t] < cuts[t + 1]) threads.emplace_back(body, cuts[t], cuts[t + 1]);
  }
  for (std::thread& thread : threads) thread.join();
}

/// Repeatable values in (-1, 1), some of them tiny.
inline float pseudo_random(std::uint64_t seed, std::uint64_t parameter, std::uint64_t element) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15ULL + parameter * 0xBF58476D1CE4E5B9ULL + element;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  x ^= x >> 31;
  const float unit = static_cast<float>(x >> 40) * 0x1p-24F;
  const float signed_unit = 2.0F * unit - 1.0F;
  return x % 17 == 0 ? signed_unit * 1e-6F : signed_unit;
}

inline Values random_values(const std::vector<ParameterInfo>& parameters, std::uint64_t seed) {
  Values values(parameters.size());
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    for (std::int64_t i = 0; i < parameters[p].numel; ++i) {
      values[p].push_back(pseudo_random(seed, p, static_cast<std::uint64_t>(i)));
    }
  }
  return values;
}

inline std::vector<ParameterInfo> infos_of(
    const std::vector<std::pair<std::int64_t, kernels::Dtype>>& sizes) {
  std::vector<ParameterInfo> infos;
  for (const auto& [numel, dtype] : sizes) {
    infos.push_back({"p" + std::to_string(infos.size()), {numel}, numel, dtype});
  }
  return infos;
}

/// As the numerics contract rounds into each type.
inline float rounded(kernels::Dtype dtype, float value) {
  switch (dtype) {
    case kernels::Dtype::kBFloat16:
      return kernels::to_float(kernels::round_half_away(value));
    case kernels::Dtype::kFloat16:
      return kernels::to_float(kernels::round_half_even(value));
    case kernels::Dtype::kFloat32:
      break;
  }
  return value;
}

class ShardRig {
 public:
  ShardRig(std::vector<ParameterInfo> infos,
           std::int64_t bucket_bytes,
           int ranks,
           const Optimizer& optimizer,
           const Values& values,
           kernels::ParallelFor parallel = serially,
           Masters masters = Masters::kSeparate,
           const std::vector<ParameterGroup>& groups = {})
      : infos_(std::move(infos)),
        plan_(plan_buckets(infos_, bucket_bytes)),
        // All bits set is a NaN in both types: whatever is not a parameter's own is poison.
        memory_(static_cast<std::size_t>(plan_.flat_bytes), std::byte{0xFF}),
        device_(kernels::make_cpu_device(std::move(parallel))) {
    for (std::size_t p = 0; p < infos_.size(); ++p) {
      for (std::size_t i = 0; i < values[p].size(); ++i) set(p, i, values[p][i]);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      shards_.push_back(std::make_unique<OptimizerShard>(
          plan_, comm::Group{rank, ranks}, *device_, stream_, memory_.data(),
          ParameterGroups(optimizer, groups, infos_), masters));
    }
  }

  void set(std::size_t parameter, std::size_t element, float value) {
    std::byte* data = element_data(parameter, element);
    const auto store = [&](const auto& number) { std::memcpy(data, &number, sizeof(number)); };
    switch (infos_[parameter].dtype) {
      case kernels::Dtype::kFloat32:
        return store(value);
      case kernels::Dtype::kBFloat16:
        return store(kernels::round_half_away(value));
      case kernels::Dtype::kFloat16:
        return store(kernels::round_half_even(value));
    }
  }

  [[nodiscard]] float get(std::size_t parameter, std::size_t element) {
    const std::byte* data = element_data(parameter, element);
    const auto load = [&](auto number) {
      std::memcpy(&number, data, sizeof(number));
      return number;
    };
    switch (infos_[parameter].dtype) {
      case kernels::Dtype::kBFloat16:
        return kernels::to_float(load(kernels::Bf16{}));
      case kernels::Dtype::kFloat16:
        return kernels::to_float(load(kernels::Fp16{}));
      case kernels::Dtype::kFloat32:
        break;
    }
    return load(0.0F);
  }

  [[nodiscard]] Values values() {
    Values all(infos_.size());
    for (std::size_t p = 0; p < infos_.size(); ++p) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(infos_[p].numel); ++i) {
        all[p].push_back(get(p, i));
      }
    }
    return all;
  }

  /// Puts `gradients` into the accumulators of whoever owns them, NaN into all padding.
  void set_gradients(const Values& gradients) {
    for (const auto& shard : shards_) {
      for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
        const Range slice = shard->slice(static_cast<std::int32_t>(b));
        float* sums = shard->accumulator(static_cast<std::int32_t>(b));
        std::fill_n(sums, slice.numel(), std::numeric_limits<float>::quiet_NaN());
        for (const Placement& placement : plan_.buckets[b].placements) {
          for (std::int64_t i = 0; i < placement.numel; ++i) {
            const std::int64_t at = placement.offset + i;
            if (at < slice.begin || at >= slice.end) continue;
            sums[at - slice.begin] = gradients[static_cast<std::size_t>(placement.parameter)]
                                              [static_cast<std::size_t>(i)];
          }
        }
      }
    }
  }

  void step(const std::vector<bool>& seen, double factor) {
    for (const auto& shard : shards_) {
      shard->begin_update(stream_, seen, factor);
      for (std::size_t b = 0; b < plan_.buckets.size(); ++b) {
        shard->update(stream_, static_cast<std::int32_t>(b));
      }
    }
  }

  [[nodiscard]] kernels::Superaccumulator sum_of_squares(const std::vector<bool>& seen) {
    kernels::Superaccumulator sum;
    for (const auto& shard : shards_) {
      shard->sum_squares(stream_, seen);
      shard->add_sum_to(sum);
    }
    return sum;
  }

  /// The p-norm of the raw sums, by the largest magnitude where that comes first.
  [[nodiscard]] double norm(const std::vector<bool>& seen, double p) {
    std::uint32_t largest = 0;
    for (const auto& shard : shards_) {
      shard->find_largest(stream_, seen);
      largest = std::max(largest, shard->largest());
    }
    const kernels::Power power =
        kernels::power_of(p, kernels::needs_largest(p) ? kernels::magnitude_of(largest) : 0.0);
    kernels::Superaccumulator sum;
    for (const auto& shard : shards_) {
      shard->sum_powers(stream_, seen, power);
      shard->add_sum_to(sum);
    }
    return kernels::norm_of(sum.value(), power);
  }

  [[nodiscard]] OptimizerShard& shard(std::size_t rank) { return *shards_[rank]; }
  [[nodiscard]] std::size_t ranks() const { return shards_.size(); }
  [[nodiscard]] const BucketPlan& plan() const { return plan_; }
  [[nodiscard]] const std::vector<std::byte>& memory() const { return memory_; }

 private:
  std::byte* element_data(std::size_t parameter, std::size_t element) {
    const BucketLayout& bucket =
        plan_.buckets[static_cast<std::size_t>(plan_.bucket_of[parameter])];
    const std::size_t offset = static_cast<std::size_t>(plan_.offset_of[parameter]) + element;
    return memory_.data() + bucket.flat_offset + offset * kernels::bytes_of(bucket.dtype);
  }

  std::vector<ParameterInfo> infos_;
  BucketPlan plan_;
  std::vector<std::byte> memory_;
  std::unique_ptr<kernels::Device> device_;
  kernels::ImmediateStream stream_;
  std::vector<std::unique_ptr<OptimizerShard>> shards_;
};

/// The functors in the most obvious loop: no shards, buckets, padding or threads.
class PlainLoop {
 public:
  PlainLoop(const std::vector<ParameterInfo>& infos, const Optimizer& optimizer, Values values)
      : infos_(infos), optimizer_(optimizer), masters_(std::move(values)), counts_(infos.size()) {
    for (std::size_t p = 0; p < infos_.size(); ++p) {
      for (float& master : masters_[p]) master = rounded(infos_[p].dtype, master);
    }
    for (Values& state : states_) {
      state = masters_;
      for (auto& one : state) std::fill(one.begin(), one.end(), initial_state(optimizer));
    }
  }

  void step(const Values& gradients, const std::vector<bool>& seen, double factor) {
    for (std::size_t p = 0; p < infos_.size(); ++p) {
      if (!seen[p]) continue;
      ++counts_[p];
      std::visit(
          [&](const auto& functor) {
            for (std::size_t i = 0; i < masters_[p].size(); ++i) update(functor, p, i, gradients);
          },
          update_at(optimizer_, counts_[p], factor));
    }
  }

  [[nodiscard]] Values values() const {
    Values all = masters_;
    for (std::size_t p = 0; p < infos_.size(); ++p) {
      for (float& value : all[p]) value = rounded(infos_[p].dtype, value);
    }
    return all;
  }

 private:
  template <class Functor>
  void update(const Functor& functor, std::size_t p, std::size_t i, const Values& gradients) {
    float now[kernels::kMaxStates];
    for (std::size_t k = 0; k < states_.size(); ++k) now[k] = states_[k][p][i];
    masters_[p][i] = functor(masters_[p][i], gradients[p][i], now);
    for (std::size_t k = 0; k < states_.size(); ++k) states_[k][p][i] = now[k];
  }

  std::vector<ParameterInfo> infos_;
  Optimizer optimizer_;
  Values masters_;
  std::array<Values, kernels::kMaxStates> states_;
  std::vector<std::int64_t> counts_;
};

/// How many elements differ in a bit; NaN differs from NaN unless the bits agree.
inline std::int64_t differing_bits(const Values& a, const Values& b) {
  std::int64_t differing = 0;
  for (std::size_t p = 0; p < a.size(); ++p) {
    for (std::size_t i = 0; i < a[p].size(); ++i) {
      differing += std::bit_cast<std::uint32_t>(a[p][i]) != std::bit_cast<std::uint32_t>(b[p][i]);
    }
  }
  return differing;
}

}  // namespace tandem::zero
