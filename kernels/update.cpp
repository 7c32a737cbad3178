// kernels/update.cpp: the scalars of an update (U3), and update() for the instruction set in use.
#include "kernels/update.h"

#include "kernels/check.h"
#include "kernels/cpu_kernels.h"

#include <cmath>

namespace tandem::kernels {
namespace {

void check(const UpdateArrays& arrays, int states) {
  static_cast<void>(arrays);
  static_cast<void>(states);
  TANDEM_ASSERT(arrays.numel >= 0, "a fragment has no negative length");
  if (arrays.numel == 0) return;
  TANDEM_ASSERT(arrays.grad != nullptr && arrays.param != nullptr && arrays.state0 != nullptr,
                "a fragment has a gradient, a parameter and a state");
  TANDEM_ASSERT(states < 2 || arrays.state1 != nullptr, "this update has two states");
  TANDEM_ASSERT((arrays.master != nullptr) == (arrays.param_dtype == Dtype::kBFloat16),
                "bf16 parameters have masters and fp32 parameters have none");
}

}  // namespace

// NOLINTBEGIN(bugprone-easily-swappable-parameters): see the header
AdamWUpdate AdamWUpdate::at_step(double lr,
                                 double beta1,
                                 double beta2,
                                 double eps,
                                 double weight_decay,
                                 std::int64_t step,
                                 double grad_factor) {
  TANDEM_ASSERT(step >= 1, "updates are counted from 1");
  const double exponent = static_cast<double>(step);
  AdamWUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.decay = static_cast<float>(1.0 - lr * weight_decay);
  update.beta1 = static_cast<float>(beta1);
  update.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  update.beta2 = static_cast<float>(beta2);
  update.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  update.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, exponent)));
  update.bias_correction2_sqrt = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, exponent)));
  update.eps = static_cast<float>(eps);
  return update;
}

SgdUpdate SgdUpdate::at_step(double lr, double momentum, double weight_decay, double grad_factor) {
  SgdUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.lr = static_cast<float>(lr);
  update.momentum = static_cast<float>(momentum);
  update.weight_decay = static_cast<float>(weight_decay);
  return update;
}
// NOLINTEND(bugprone-easily-swappable-parameters)

void update(const AdamWUpdate& functor, const UpdateArrays& arrays) {
  check(arrays, AdamWUpdate::kStates);
  cpu_kernels().update_adamw(functor, arrays);
}

void update(const SgdUpdate& functor, const UpdateArrays& arrays) {
  check(arrays, SgdUpdate::kStates);
  cpu_kernels().update_sgd(functor, arrays);
}

}  // namespace tandem::kernels
