// tests/kernels/update_rig.h: fragments with their memory in every way of storing parameters, and
// one or more settings of every optimizer.
#pragma once

#include "kernels/masters.h"
#include "kernels/update.h"
#include "tests/kernels/values.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tandem::kernels {

using Floats = std::vector<float>;
using Halves = std::vector<std::uint16_t>;

enum class Storage { kFp32, kBf16Masters, kBf16Remainders, kFp16Masters };
inline constexpr Storage kStorages[] = {Storage::kFp32, Storage::kBf16Masters,
                                        Storage::kBf16Remainders, Storage::kFp16Masters};

inline const char* name_of(Storage storage) {
  switch (storage) {
    case Storage::kBf16Masters:
      return "bf16 with masters";
    case Storage::kBf16Remainders:
      return "bf16 with remainders";
    case Storage::kFp16Masters:
      return "fp16 with masters";
    case Storage::kFp32:
      break;
  }
  return "fp32";
}

inline std::uint16_t rounded_bits(Storage storage, float master) {
  return storage == Storage::kFp16Masters ? round_half_even(master).bits
                                          : round_half_away(master).bits;
}
inline float value_of_bits(Storage storage, std::uint16_t bits) {
  return storage == Storage::kFp16Masters ? to_float(Fp16{bits}) : to_float(Bf16{bits});
}

/// Parameters that equal `value`, rounded where they have 16 bits, and zero states. Each array
/// begins at an odd element and ends with a guard.
struct Fragment {
  static constexpr float kGuard = 4321.0F;
  static constexpr std::uint16_t kHalfGuard = 0x1234;
  static constexpr std::size_t kStart = 3;

  Storage storage;
  std::int64_t numel;
  Floats grad, value;  // value: the fp32 parameter, or the master
  std::array<Floats, kMaxStates> state;
  Halves half, remainder;  // of 16-bit parameters

  Fragment(Storage kind, const Floats& values)
      : storage(kind), numel(static_cast<std::int64_t>(values.size())) {
    const std::size_t all = values.size() + kStart + 1;
    grad = guarded(Floats(values.size()));
    for (Floats& own : state) own = grad;
    value.assign(all, kGuard);
    half.assign(all, kHalfGuard);
    remainder.assign(all, kHalfGuard);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float master = storage == Storage::kFp32 ? values[i] : canonical(values[i]);
      value[kStart + i] = master;
      half[kStart + i] = rounded_bits(storage, master);
      remainder[kStart + i] = remainder_of(master);
    }
  }

  static Floats guarded(Floats values) {
    values.insert(values.begin(), kStart, kGuard);
    values.push_back(kGuard);
    return values;
  }

  UpdateArrays arrays(int states) {
    UpdateArrays arrays;
    arrays.grad = grad.data() + kStart;
    arrays.numel = numel;
    for (int k = 0; k < states; ++k) {
      arrays.state[static_cast<std::size_t>(k)] =
          state[static_cast<std::size_t>(k)].data() + kStart;
    }
    if (storage == Storage::kFp32) {
      arrays.param = value.data() + kStart;
      return arrays;
    }
    arrays.param = half.data() + kStart;
    arrays.param_dtype = storage == Storage::kFp16Masters ? Dtype::kFloat16 : Dtype::kBFloat16;
    if (storage == Storage::kBf16Remainders) {
      arrays.remainder = remainder.data() + kStart;
    } else {
      arrays.master = value.data() + kStart;
    }
    return arrays;
  }

  /// The master of element i, or the fp32 parameter.
  [[nodiscard]] float master(std::int64_t i) const {
    const std::size_t at = kStart + static_cast<std::size_t>(i);
    if (storage != Storage::kBf16Remainders) return value[at];
    return join_master(Bf16{half[at]}, remainder[at]);
  }

  /// "" or what first differs in a bit from `other` (guards included).
  [[nodiscard]] std::string difference(const Fragment& other) const {
    const auto all = static_cast<std::int64_t>(value.size());
    std::string found = first_difference(value.data(), other.value.data(), all);
    if (!found.empty()) return "value, " + found;
    found = first_difference(grad.data(), other.grad.data(), all);
    if (!found.empty()) return "gradient, " + found;
    for (std::size_t k = 0; k < kMaxStates; ++k) {
      found = first_difference(state[k].data(), other.state[k].data(), all);
      if (!found.empty()) return "state " + std::to_string(k) + ", " + found;
    }
    for (std::size_t i = 0; i < half.size(); ++i) {
      if (half[i] != other.half[i]) return "parameter " + std::to_string(i);
      if (remainder[i] != other.remainder[i]) return "remainder " + std::to_string(i);
    }
    return "";
  }
};

struct NamedUpdate {
  std::string name;
  Update update;
};

/// Every optimizer, as of update number `step`.
inline std::vector<NamedUpdate> every_update(std::int64_t step, double lr, double grad_factor) {
  const double decay = 0.0625;
  return {
      {"AdamW", AdamUpdate<true, false>::at_step(lr, 0.9, 0.999, 1e-8, decay, step, grad_factor)},
      {"AdamW, amsgrad",
       AdamUpdate<true, true>::at_step(lr, 0.9, 0.99, 1e-8, decay, step, grad_factor)},
      {"Adam", AdamUpdate<false, false>::at_step(lr, 0.9, 0.999, 1e-8, decay, step, grad_factor)},
      {"Adam, amsgrad",
       AdamUpdate<false, true>::at_step(lr, 0.5, 0.9, 1e-8, decay, step, grad_factor)},
      {"SGD", SgdUpdate<false, false>::at_step(lr, 0.0, 0.0, decay, step, grad_factor)},
      {"SGD, momentum", SgdUpdate<true, false>::at_step(lr, 0.9, 0.25, decay, step, grad_factor)},
      {"SGD, nesterov", SgdUpdate<true, true>::at_step(lr, 0.9, 0.0, decay, step, grad_factor)},
      {"RMSprop", RmspropUpdate<false, false>::at_step(lr, 0.99, 1e-8, 0.0, decay, grad_factor)},
      {"RMSprop, momentum",
       RmspropUpdate<false, true>::at_step(lr, 0.99, 1e-8, 0.9, decay, grad_factor)},
      {"RMSprop, centered",
       RmspropUpdate<true, false>::at_step(lr, 0.9, 1e-8, 0.0, decay, grad_factor)},
      {"RMSprop, centered, momentum",
       RmspropUpdate<true, true>::at_step(lr, 0.9, 1e-8, 0.9, decay, grad_factor)},
      {"Adagrad", AdagradUpdate::at_step(lr, 0.01, 1e-10, decay, step, grad_factor)},
      {"Lion", LionUpdate::at_step(lr, 0.9, 0.99, decay, grad_factor)},
  };
}

}  // namespace tandem::kernels
