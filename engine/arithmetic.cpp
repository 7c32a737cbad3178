// engine/arithmetic.cpp: what users do to the gradients of a window: token counts, multipliers and
// the loss scale. All end in one factor of the update; accumulators are touched only where a later
// pass, or another scale, would otherwise add what is not meant (docs/averaging.md).
#include "engine/world_state.h"
#include <tandem/error.h>
#include <tandem/token_count.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

namespace tandem {

std::int64_t TokenCount::checked(std::int64_t count, bool fits) {
  if (!fits) {
    throw InvalidArgument("count_tokens: " + std::to_string(count) +
                          " tokens; a count is >= 0 and below 2^63");
  }
  return count;
}

TokenCount::TokenCount(const at::Tensor& count) {
  if (!count.defined() || count.numel() != 1 ||
      !c10::isIntegralType(count.scalar_type(), /*includeBool=*/true)) {
    throw InvalidArgument("count_tokens: a tensor of tokens has one element of an integer type" +
                          (count.defined() ? ", not " + std::to_string(count.numel()) +
                                                 " of type " + c10::toString(count.scalar_type()) +
                                                 "; use .sum().to(torch::kLong)"
                                           : std::string("; this one is undefined")));
  }
  const at::NoGradGuard no_grad;
  tensor_ = count.detach().to(at::kLong, /*non_blocking=*/false, /*copy=*/true).reshape({});
}

}  // namespace tandem

namespace tandem::engine {

// --- tokens ---

void WorldState::count_tokens(const EngineCore* only, const TokenCount& tokens) {
  check_usable();
  Lock lock(mutex_);
  abandon_own_pass();
  wait_until_resolved(
      lock);  // if the last pass failed, what is counted now belongs to the next window
  for (const auto& core : cores_) {
    if (core->retired() || (only != nullptr && core.get() != only)) {
      continue;
    }
    Window& window = core->window;
    if (tokens.is_tensor()) {
      const at::NoGradGuard no_grad;
      const at::Tensor& count = tokens.tensor();
      const auto same =
          std::find_if(window.unread.begin(), window.unread.end(),
                       [&](const auto& one) { return one.sum.device() == count.device(); });
      if (same == window.unread.end()) {
        window.unread.push_back({count, count});
      } else {
        *same = {same->sum + count, at::minimum(same->smallest, count)};
      }
    } else if (window.tokens >
               std::numeric_limits<std::int64_t>::max() / group_.size - tokens.number()) {
      throw InvalidArgument("count_tokens: the count of engine '" + core->name + "' overflows");
    } else {
      window.tokens += tokens.number();
    }
    window.counted = true;
  }
}

/// Before a gate that carries the counts. What is wrong with those that came as tensors, or
/// nothing.
std::string WorldState::read_tokens() {
  const bool on_device = std::any_of(cores_.begin(), cores_.end(), [](const auto& core) {
    return std::any_of(core->window.unread.begin(), core->window.unread.end(),
                       [](const UnreadTokens& one) { return !one.sum.is_cpu(); });
  });
  if (on_device) {
    await_devices("tokens counted on a device");
  }
  for (const auto& core : cores_) {
    Window& window = core->window;
    for (const UnreadTokens& unread : std::exchange(window.unread, {})) {
      const auto smallest = unread.smallest.item<std::int64_t>();
      const auto sum = unread.sum.item<std::int64_t>();
      if (smallest < 0) {
        return "engine '" + core->name + "': count_tokens was given a tensor of " +
               std::to_string(smallest) + " tokens; a count is >= 0";
      }
      if (sum < 0 || window.tokens > std::numeric_limits<std::int64_t>::max() / group_.size - sum) {
        return "engine '" + core->name + "': the count of tokens overflows";
      }
      window.tokens += sum;
    }
  }
  return {};
}

// --- multipliers ---

void WorldState::multiply_gradients(const EngineCore* only, double factor) {
  if (!std::isfinite(factor)) {
    throw InvalidArgument("multiply_gradients: " + std::to_string(factor) +
                          "; a factor is finite. Nothing was multiplied");
  }
  check_usable();
  Lock lock(mutex_);
  abandon_own_pass();
  wait_until_resolved(lock);  // what that pass brings is multiplied, too
  for (const auto& core : cores_) {
    if (!core->retired() && (only == nullptr || core.get() == only)) {
      core->window.multipliers.add(factor);
    }
  }
}

std::vector<double> WorldState::multipliers() const {
  std::vector<double> products;
  for (const auto& core : cores_) {
    products.push_back(core->window.multipliers.product());
  }
  return products;
}

void WorldState::multiply_windows(const std::vector<double>& factors) {
  for (const auto& core : cores_) {
    multiply_window(*core, factors[static_cast<std::size_t>(core->index)]);
  }
}

/// In fp32: what was reduced, behind the reductions that are enqueued, and what is held here.
void WorldState::multiply_window(EngineCore& core, double factor) {
  if (factor == 1.0 || core.retired()) {
    return;
  }
  const auto value = static_cast<float>(factor);
  core.gradients->multiply(value);
  std::vector<std::int32_t> buckets;
  for (std::size_t b = 0; b < core.bucket_count(); ++b) {
    if (!core.window.fresh[b]) {
      buckets.push_back(static_cast<std::int32_t>(b));
    }
  }
  if (buckets.empty()) {
    return;
  }
  queue_->enqueue([shared = cores_[static_cast<std::size_t>(core.index)], value,
                   buckets = std::move(buckets), trace = trace_] {
    const TraceSpan span(*trace, "multiply", Trace::Row::kQueue, {.engine = shared->serial});
    for (const std::int32_t bucket : buckets) {
      shared->lane->torch->device().multiply(*shared->lane->stream,
                                             shared->shard->accumulator(bucket), value,
                                             shared->shard->slice(bucket).numel());
    }
  });
}

// --- the loss scale ---

at::Tensor WorldState::scale(const at::Tensor& loss) {
  if (!loss.defined() || !loss.is_floating_point()) {
    throw InvalidArgument("World::scale: a loss is a tensor of a floating-point type");
  }
  check_usable();
  const std::lock_guard lock(mutex_);
  scale_called_ = true;
  // A 16-bit loss would overflow.
  return (loss.element_size() < 4 ? loss.to(at::kFloat) : loss) *
         loss_scale_.value_or(options_.loss_scaling.initial);
}

double WorldState::loss_scale() const {
  return locked([&] {  // before its first pass, too, a scaled loss is what it is
    return loss_scale_.value_or(scale_called_ ? options_.loss_scaling.initial : 1.0);
  });
}

/// Windows that are open were accumulated under the old scale.
void WorldState::set_loss_scale(double scale) {
  const double old = loss_scale_.value_or(1.0);
  loss_scale_ = scale;
  for (const auto& core : cores_) {
    multiply_window(*core, scale / old);  // a power of two
  }
}

void WorldState::begin_scaling(GateSay& say) {
  const bool called = std::exchange(scale_called_, false);
  if (called && !loss_scale_) {
    set_loss_scale(options_.loss_scaling.initial);
    scaling_began_ = true;
  } else if (!called && loss_scale_ && !warned_unscaled_) {
    warned_unscaled_ = true;
    std::fprintf(stderr,
                 "tandem: a backward pass begins without World::scale() since the last one, in a "
                 "world whose losses are scaled: its gradients will be divided by %g all the same "
                 "(this is said once)\n",
                 *loss_scale_);
  }
  say.loss_scale = loss_scale_.value_or(0.0);
}

/// torch.amp.GradScaler.update(): behind a step, whose windows are empty now. The same on all
/// ranks.
void WorldState::move_loss_scale(const StepResult& result) {
  if (!loss_scale_ || result.reason == StepReason::kEmpty) {
    return;
  }
  const LossScaling& rules = options_.loss_scaling;
  if (!result.applied) {
    applied_since_scale_moved_ = 0;
    constexpr double kSmallest = std::numeric_limits<float>::min();
    set_loss_scale(std::max(*loss_scale_ * rules.backoff_factor, kSmallest));
  } else if (++applied_since_scale_moved_ == rules.growth_interval) {
    applied_since_scale_moved_ = 0;
    if (*loss_scale_ * rules.growth_factor <= std::numeric_limits<float>::max()) {
      set_loss_scale(*loss_scale_ * rules.growth_factor);
    }
  }
}

}  // namespace tandem::engine
