// kernels/update.h: the optimizers' arithmetic, one functor an optimizer, one element a call.
//
// U1 Element i depends on element i only; nothing outside [0, numel) is touched.
// U2 The same functor serves the CPU loop (vectorised per ISA, contraction off: the same bits on
//    every ISA) and later a CUDA kernel.
// U3 Scalars are computed once per fragment on the host, bias corrections in double.
// Called by zero/optimizer_shard.
#pragma once

#include "kernels/dtype.h"
#include "kernels/inline.h"

#include <cstdint>
#include <math.h>  // the C function sqrtf: no inline wrapper (inline.h)

namespace tandem::kernels {

/// AdamW of torch.optim (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019,
/// algorithm 2): decay first, then the step with bias-corrected moments.
struct AdamWUpdate {
  float grad_factor = 1.0F;  // multiplier / denominator * clip, applied to the raw gradient
  float decay = 1.0F;        // 1 - lr * weight_decay
  float beta1 = 0.9F;
  float one_minus_beta1 = 0.1F;
  float beta2 = 0.999F;
  float one_minus_beta2 = 0.001F;
  float step_size = 1e-3F;             // lr / (1 - beta1^step)
  float bias_correction2_sqrt = 1.0F;  // sqrt(1 - beta2^step)
  float eps = 1e-8F;

  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq

  // NOLINTBEGIN(bugprone-easily-swappable-parameters): the order of the published formulas
  /// Scalars of update number `step` (from 1) of one parameter.
  static AdamWUpdate at_step(double lr,
                             double beta1,
                             double beta2,
                             double eps,
                             double weight_decay,
                             std::int64_t step,
                             double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param,
                                        float grad,
                                        float& exp_avg,
                                        float& exp_avg_sq) const {
    const float g = grad * grad_factor;
    exp_avg = beta1 * exp_avg + one_minus_beta1 * g;
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (g * g);
    const float denominator = ::sqrtf(exp_avg_sq) / bias_correction2_sqrt + eps;
    return param * decay - step_size * (exp_avg / denominator);
  }
  // NOLINTEND(bugprone-easily-swappable-parameters)
};

/// SGD of torch.optim with momentum (and L2 weight decay), without dampening and nesterov.
struct SgdUpdate {
  float grad_factor = 1.0F;
  float lr = 1e-3F;
  float momentum = 0.0F;
  float weight_decay = 0.0F;

  static constexpr int kStates = 1;  // momentum_buffer; zero before the first update, which makes
                                     // the first buffer the gradient, as torch.optim has it

  // NOLINTBEGIN(bugprone-easily-swappable-parameters): the order of the published formulas
  static SgdUpdate at_step(double lr, double momentum, double weight_decay, double grad_factor);

  TANDEM_KERNEL_INLINE float operator()(float param, float grad, float& momentum_buffer) const {
    const float g = grad * grad_factor + weight_decay * param;
    momentum_buffer = momentum * momentum_buffer + g;
    return param - lr * momentum_buffer;
  }
  // NOLINTEND(bugprone-easily-swappable-parameters)
};

/// One contiguous fragment; every array [numel].
struct UpdateArrays {
  const float* grad = nullptr;  // in: the accumulated sum, before grad_factor
  void* param = nullptr;        // in/out where master is null (then fp32), else out only
  Dtype param_dtype = Dtype::kFloat32;
  float* master = nullptr;  // in/out: fp32 master weights of a bf16 parameter, else null
  float* state0 = nullptr;  // in/out
  float* state1 = nullptr;  // in/out; null for functors with one state
  std::int64_t numel = 0;
};

/// Runs one update over a fragment. bf16 parameters receive the master rounded halves away from
/// zero. AdamW moves 28 bytes an fp32 element, 30 a bf16 one. Blocking, on the calling thread.
/// Different fragments may run on different threads.
void update(const AdamWUpdate& functor, const UpdateArrays& arrays);
void update(const SgdUpdate& functor, const UpdateArrays& arrays);

}  // namespace tandem::kernels
