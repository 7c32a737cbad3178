// kernels/optimizers.cpp: the scalars of one update (O3).
#include "kernels/optimizers.h"

#include "kernels/check.h"

#include <cmath>

namespace tandem::kernels {

// NOLINTBEGIN(bugprone-easily-swappable-parameters): see the header

template <bool kDecoupled, bool kAmsgrad>
AdamUpdate<kDecoupled, kAmsgrad> AdamUpdate<kDecoupled, kAmsgrad>::at_step(double lr,
                                                                           double beta1,
                                                                           double beta2,
                                                                           double eps,
                                                                           double weight_decay,
                                                                           std::int64_t step,
                                                                           double grad_factor) {
  TANDEM_ASSERT(step >= 1, "updates are counted from 1");
  const double exponent = static_cast<double>(step);
  AdamUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.decay = static_cast<float>(1.0 - lr * weight_decay);
  update.weight_decay = static_cast<float>(weight_decay);
  update.beta1 = static_cast<float>(beta1);
  update.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  update.beta2 = static_cast<float>(beta2);
  update.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  update.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, exponent)));
  update.bias_correction2_sqrt = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, exponent)));
  update.eps = static_cast<float>(eps);
  return update;
}

template <bool kMomentum, bool kNesterov>
SgdUpdate<kMomentum, kNesterov> SgdUpdate<kMomentum, kNesterov>::at_step(double lr,
                                                                         double momentum,
                                                                         double dampening,
                                                                         double weight_decay,
                                                                         std::int64_t step,
                                                                         double grad_factor) {
  TANDEM_ASSERT(step >= 1, "updates are counted from 1");
  SgdUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.lr = static_cast<float>(lr);
  update.momentum = static_cast<float>(momentum);
  update.one_minus_dampening = static_cast<float>(1.0 - dampening);
  update.weight_decay = static_cast<float>(weight_decay);
  update.first = step == 1;
  return update;
}

template <bool kCentered, bool kMomentum>
RmspropUpdate<kCentered, kMomentum> RmspropUpdate<kCentered, kMomentum>::at_step(
    double lr, double alpha, double eps, double momentum, double weight_decay, double grad_factor) {
  RmspropUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.lr = static_cast<float>(lr);
  update.alpha = static_cast<float>(alpha);
  update.one_minus_alpha = static_cast<float>(1.0 - alpha);
  update.eps = static_cast<float>(eps);
  update.momentum = static_cast<float>(momentum);
  update.weight_decay = static_cast<float>(weight_decay);
  return update;
}

AdagradUpdate AdagradUpdate::at_step(double lr,
                                     double lr_decay,
                                     double eps,
                                     double weight_decay,
                                     std::int64_t step,
                                     double grad_factor) {
  TANDEM_ASSERT(step >= 1, "updates are counted from 1");
  AdagradUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.step_size = static_cast<float>(lr / (1.0 + static_cast<double>(step - 1) * lr_decay));
  update.eps = static_cast<float>(eps);
  update.weight_decay = static_cast<float>(weight_decay);
  return update;
}

LionUpdate LionUpdate::at_step(
    double lr, double beta1, double beta2, double weight_decay, double grad_factor) {
  LionUpdate update;
  update.grad_factor = static_cast<float>(grad_factor);
  update.lr = static_cast<float>(lr);
  update.beta1 = static_cast<float>(beta1);
  update.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  update.beta2 = static_cast<float>(beta2);
  update.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  update.weight_decay = static_cast<float>(weight_decay);
  return update;
}

// NOLINTEND(bugprone-easily-swappable-parameters)

template struct AdamUpdate<true, false>;
template struct AdamUpdate<true, true>;
template struct AdamUpdate<false, false>;
template struct AdamUpdate<false, true>;
template struct SgdUpdate<false, false>;
template struct SgdUpdate<true, false>;
template struct SgdUpdate<true, true>;
template struct RmspropUpdate<false, false>;
template struct RmspropUpdate<false, true>;
template struct RmspropUpdate<true, false>;
template struct RmspropUpdate<true, true>;

}  // namespace tandem::kernels
