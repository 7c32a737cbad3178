// tests/support/oracle.h: what a scenario must lead to, computed by one process that holds
// everything.
//
// Slow and obvious. Models compute where the test device is, everything else is done on the CPU. Of
// Tandem it takes value types (settings) only; FunctorOracle also takes the
// update functors, because it answers whether everything around them kept every bit.
#pragma once

#include "tests/support/scenario.h"

#include <memory>
#include <vector>

namespace tandem::testing {

/// Gradients of one step's micro-batches, each computed on its own in the parameter's type and
/// added in (pass, rank) order into fp32.
struct WindowGradients {
  std::vector<at::Tensor> sums;      // [parameter], fp32; undefined: no rank saw the parameter
  std::vector<double> denominators;  // [net]; 0: nobody saw any of its parameters
  std::vector<double> multipliers;   // [net]; said since the last pass
};

class Oracle {
 public:
  Oracle(const Scenario& scenario, int world_size);
  virtual ~Oracle() = default;
  Oracle(const Oracle&) = delete;
  Oracle& operator=(const Oracle&) = delete;

  /// One step of the loop. `reported_clip_factor`: what the step under test says that it clipped
  /// by.
  void step(int index, double reported_clip_factor);

  /// Each once, as the models hold them.
  [[nodiscard]] std::vector<at::Tensor> parameters() const { return parameters_; }
  [[nodiscard]] const Nets& nets() const { return nets_; }
  /// Of the last step: divisors of each net, and the joint norm before clipping (NaN if not
  /// finite).
  [[nodiscard]] const std::vector<double>& denominators() const { return denominators_; }
  [[nodiscard]] double norm() const { return norm_; }
  /// The gradients that step `index` would apply from here, before clipping, in double; undefined:
  /// no rank saw the parameter.
  [[nodiscard]] std::vector<at::Tensor> applied_gradients(int index) {
    return averaged(gradients(index));
  }
  /// Makes the models hold `values`; masters and moments stay.
  void adopt(const std::vector<at::Tensor>& values);

 protected:
  virtual WindowGradients gradients(int index);
  /// Updates masters_ where `sums` is defined.
  virtual void update(int index, const WindowGradients& window, double reported_clip_factor) = 0;

  /// Of one parameter: its engine's, with what its group overrides; and the factor that the
  /// schedule puts on its learning rate (1 where the group has one of its own).
  [[nodiscard]] const Optimizer& settings(std::size_t parameter) const;
  [[nodiscard]] double rate_factor(int index, std::size_t parameter) const;

  Scenario scenario_;
  int world_size_;
  Nets nets_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::int32_t> owner_;  // [parameter], index of its net
  std::vector<at::Tensor> masters_;  // [parameter], fp32 leaves

 private:
  [[nodiscard]] std::vector<at::Tensor> averaged(const WindowGradients& window) const;

  std::vector<Optimizer> settings_;  // [parameter]
  std::vector<bool> own_rate_;       // [parameter]
  std::vector<double> denominators_;
  double norm_ = 0.0;
};

/// (a) split: summed micro-batch gradients, torch's clip_grad_norm_, torch::optim on fp32 copies
/// (Lion, which torch::optim lacks: its paper's lines in LibTorch).
std::unique_ptr<Oracle> split_oracle(const Scenario& scenario, int world_size);
/// (b) whole: one backward of the sum of all micro-batches' losses, then as above.
std::unique_ptr<Oracle> whole_oracle(const Scenario& scenario, int world_size);
/// (c) bits: as split, with a plain loop over the functors of kernels/update.h.
std::unique_ptr<Oracle> functor_oracle(const Scenario& scenario, int world_size);

/// ||a - b|| / ||c||, over all tensors, in double.
double distance(const std::vector<at::Tensor>& a,
                const std::vector<at::Tensor>& b,
                const std::vector<at::Tensor>& c);
/// a - b, in double.
std::vector<at::Tensor> difference(const std::vector<at::Tensor>& a,
                                   const std::vector<at::Tensor>& b);
/// Copies that later updates leave alone.
std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors);
/// Elements whose bits differ.
std::int64_t differing_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

}  // namespace tandem::testing
