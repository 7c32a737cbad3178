// zero/update_rule.h: what optimizer settings mean: which are allowed, how much state they keep,
// and the kernel's scalars of one update.
//
// Called by zero (groups, optimizer shard) and engine (layouts).
#pragma once

#include "kernels/update.h"
#include <tandem/optimizer.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tandem::zero {

/// Throws InvalidArgument naming the field when a setting is NaN, infinite or out of range.
void check(const Optimizer& optimizer);

/// "AdamW lr 0.001, beta1 0.9, ...", every setting, to full precision.
[[nodiscard]] std::string describe(const Optimizer& optimizer);

/// The number of that name ("lr"), or null where the optimizer has none.
[[nodiscard]] double* find_setting(Optimizer& optimizer, std::string_view name);

/// fp32 arrays that an element's state takes, and what a state is before the first update.
[[nodiscard]] int states_of(const Optimizer& optimizer);
[[nodiscard]] float initial_state(const Optimizer& optimizer);

/// The scalars of update number `step` (from 1). `grad_factor`: multiplier / denominator * clip.
[[nodiscard]] kernels::Update update_at(const Optimizer& optimizer,
                                        std::int64_t step,
                                        double grad_factor);

}  // namespace tandem::zero
