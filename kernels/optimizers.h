// kernels/optimizers.h: the optimizers' arithmetic, one functor an optimizer, one element a call:
//   new_param = functor(param, grad, state)   with state[0, kStates) updated in place.
//
// O1 The formulas are torch.optim's (Lion: its paper), in fp32, left to right, without contraction.
// O2 The same functor serves the CPU loop (the same bits on every instruction set) and later a CUDA
//    kernel.
// O3 at_step() computes the scalars of one update on the host, bias corrections in double.
//    grad_factor (multiplier / denominator * clip) is applied to the raw gradient, once, first.
// O4 States are fp32. They begin as zeros, AdagradUpdate's as what the caller chooses.
// Called by kernels/update.h's loops, at_step() by zero/optimizer_shard.
#pragma once

#include "kernels/inline.h"

#include <cstdint>
#include <math.h>  // the C function sqrtf: no inline wrapper (inline.h)

namespace tandem::kernels {

// NOLINTBEGIN(bugprone-easily-swappable-parameters): the order of the published formulas

/// AdamW (kDecoupled; Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm
/// 2: decay first, then the step with bias-corrected moments) and Adam (Kingma and Ba, 2015; decay
/// is added to the gradient). kAmsgrad (Reddi and others, 2018): the largest second moment so far
/// stands in the denominator.
template <bool kDecoupled, bool kAmsgrad>
struct AdamUpdate {
  static constexpr int kStates = kAmsgrad ? 3 : 2;  // exp_avg, exp_avg_sq, [max_exp_avg_sq]

  float grad_factor = 1.0F;
  float decay = 1.0F;         // decoupled: 1 - lr * weight_decay
  float weight_decay = 0.0F;  // not decoupled
  float beta1 = 0.9F;
  float one_minus_beta1 = 0.1F;
  float beta2 = 0.999F;
  float one_minus_beta2 = 0.001F;
  float step_size = 1e-3F;             // lr / (1 - beta1^step)
  float bias_correction2_sqrt = 1.0F;  // sqrt(1 - beta2^step)
  float eps = 1e-8F;

  /// Of update number `step` (from 1) of one parameter.
  static AdamUpdate at_step(double lr,
                            double beta1,
                            double beta2,
                            double eps,
                            double weight_decay,
                            std::int64_t step,
                            double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param, float grad, float* state) const {
    float g = grad * grad_factor;
    if constexpr (!kDecoupled) g += weight_decay * param;
    const float exp_avg = beta1 * state[0] + one_minus_beta1 * g;
    const float exp_avg_sq = beta2 * state[1] + one_minus_beta2 * (g * g);
    state[0] = exp_avg;
    state[1] = exp_avg_sq;
    float second_moment = exp_avg_sq;
    if constexpr (kAmsgrad) {
      // torch.maximum: NaN if either is
      const bool larger = exp_avg_sq > state[2] || exp_avg_sq != exp_avg_sq;
      second_moment = larger ? exp_avg_sq : state[2];
      state[2] = second_moment;
    }
    const float denominator = ::sqrtf(second_moment) / bias_correction2_sqrt + eps;
    const float decayed = kDecoupled ? param * decay : param;
    return decayed - step_size * (exp_avg / denominator);
  }
};

/// SGD, with momentum (Sutskever and others, 2013, in torch.optim's form); weight decay is added to
/// the gradient. The first update's buffer is the gradient itself, undampened, whatever the state
/// held before.
template <bool kMomentum, bool kNesterov>
struct SgdUpdate {
  static_assert(kMomentum || !kNesterov, "nesterov needs momentum");
  static constexpr int kStates = kMomentum ? 1 : 0;  // [momentum_buffer]

  float grad_factor = 1.0F;
  float lr = 1e-3F;
  float momentum = 0.0F;
  float one_minus_dampening = 1.0F;
  float weight_decay = 0.0F;
  bool first = true;

  /// Of update number `step` (from 1) of one parameter. `momentum` and `dampening` are unused
  /// without kMomentum.
  static SgdUpdate at_step(double lr,
                           double momentum,
                           double dampening,
                           double weight_decay,
                           std::int64_t step,
                           double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param, float grad, float* state) const {
    const float g = grad * grad_factor + weight_decay * param;
    if constexpr (kMomentum) {
      const float later = momentum * state[0] + one_minus_dampening * g;
      const float buffer = first ? g : later;
      state[0] = buffer;
      return param - lr * (kNesterov ? g + momentum * buffer : buffer);
    } else {
      static_cast<void>(state);
      return param - lr * g;
    }
  }
};

/// RMSprop (Hinton, lecture notes, 2012), kCentered as in Graves, Generating Sequences With
/// Recurrent Neural Networks, 2013; weight decay is added to the gradient. A variance that rounding
/// has made negative counts as 0, where torch.optim's centered form would give NaN.
template <bool kCentered, bool kMomentum>
struct RmspropUpdate {
  // square_avg, [grad_avg], [momentum_buffer]
  static constexpr int kStates = 1 + (kCentered ? 1 : 0) + (kMomentum ? 1 : 0);

  float grad_factor = 1.0F;
  float lr = 1e-2F;
  float alpha = 0.99F;
  float one_minus_alpha = 0.01F;
  float eps = 1e-8F;
  float momentum = 0.0F;
  float weight_decay = 0.0F;

  /// Of any update. `momentum` is unused without kMomentum.
  static RmspropUpdate at_step(double lr,
                               double alpha,
                               double eps,
                               double momentum,
                               double weight_decay,
                               double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param, float grad, float* state) const {
    const float g = grad * grad_factor + weight_decay * param;
    const float square_avg = alpha * state[0] + one_minus_alpha * (g * g);
    state[0] = square_avg;
    float variance = square_avg;
    if constexpr (kCentered) {
      const float grad_avg = alpha * state[1] + one_minus_alpha * g;
      state[1] = grad_avg;
      variance = square_avg - grad_avg * grad_avg;
      variance = variance < 0.0F ? 0.0F : variance;
    }
    const float direction = g / (::sqrtf(variance) + eps);
    if constexpr (kMomentum) {
      constexpr int kBuffer = kCentered ? 2 : 1;
      const float buffer = momentum * state[kBuffer] + direction;
      state[kBuffer] = buffer;
      return param - lr * buffer;
    } else {
      return param - lr * direction;
    }
  }
};

/// Adagrad (Duchi, Hazan and Singer, 2011) with torch.optim's decay of the learning rate; weight
/// decay is added to the gradient.
struct AdagradUpdate {
  static constexpr int kStates = 1;  // sum, which begins as initial_accumulator_value

  float grad_factor = 1.0F;
  float step_size = 1e-2F;  // lr / (1 + (step - 1) * lr_decay)
  float eps = 1e-10F;
  float weight_decay = 0.0F;

  /// Of update number `step` (from 1) of one parameter.
  static AdagradUpdate at_step(double lr,
                               double lr_decay,
                               double eps,
                               double weight_decay,
                               std::int64_t step,
                               double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param, float grad, float* state) const {
    const float g = grad * grad_factor + weight_decay * param;
    const float sum = state[0] + g * g;
    state[0] = sum;
    return param - step_size * (g / (::sqrtf(sum) + eps));
  }
};

/// Lion (Chen and others, Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2). The
/// sign of 0 is 0, of NaN NaN.
struct LionUpdate {
  static constexpr int kStates = 1;  // exp_avg

  float grad_factor = 1.0F;
  float lr = 1e-4F;
  float beta1 = 0.9F;
  float one_minus_beta1 = 0.1F;
  float beta2 = 0.99F;
  float one_minus_beta2 = 0.01F;
  float weight_decay = 0.0F;

  /// Of any update.
  static LionUpdate at_step(
      double lr, double beta1, double beta2, double weight_decay, double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param, float grad, float* state) const {
    const float g = grad * grad_factor;
    const float direction = beta1 * state[0] + one_minus_beta1 * g;
    const float not_positive = direction < 0.0F ? -1.0F : direction;
    const float sign = direction > 0.0F ? 1.0F : not_positive;
    state[0] = beta2 * state[0] + one_minus_beta2 * g;
    return param - lr * (sign + weight_decay * param);
  }
};

// NOLINTEND(bugprone-easily-swappable-parameters)

}  // namespace tandem::kernels
