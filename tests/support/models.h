// tests/support/models.h: the small models that tests train, and how tests hold any of them.
#pragma once

#include <tandem/engine.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tandem::testing {

/// A module of one tensor in and one out.
class Tower : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& input) = 0;
};

/// Gives every parameter of `module` the values of (key, its place).
void fill(torch::nn::Module& module, std::uint64_t key);

/// Linear, tanh, Linear; computes in its parameters' type.
class Mlp : public Tower {
 public:
  Mlp(std::int64_t inputs,
      std::int64_t hidden,
      std::int64_t outputs,
      std::uint64_t key,
      at::ScalarType dtype = at::kFloat);
  at::Tensor forward(const at::Tensor& input) override;

  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
};

/// 8 -> 16 -> 8, what most scenarios train.
std::shared_ptr<Mlp> mlp(std::uint64_t key, at::ScalarType dtype = at::kFloat);

/// One parameter "w" of `numel` times `value`; forward multiplies by it.
class Scale : public Tower {
 public:
  Scale(std::int64_t numel, double value, at::ScalarType dtype = at::kFloat);
  at::Tensor forward(const at::Tensor& input) override;

  at::Tensor w;
};

/// One model of a scenario: a tower, or named tensors that belong to no module. `forward` is the
/// engine's where Tandem trains it, the tower's own where an oracle does.
struct Net {
  std::shared_ptr<Tower> tower;
  NamedTensors tensors;
  std::function<at::Tensor(const at::Tensor&)> forward;

  /// Named, in registration order, tied ones as often as they are registered.
  [[nodiscard]] NamedTensors parameters() const;
  /// By its name; throws std::out_of_range.
  [[nodiscard]] at::Tensor parameter(const std::string& name) const;
};
using Nets = std::vector<Net>;

Net net_of(std::shared_ptr<Tower> tower);
Net net_of(NamedTensors tensors);

/// Where models train and inputs lie: the CPU, or TANDEM_TEST_DEVICE=cuda (the first GPU).
at::Device test_device();
/// `nets`, their parameters moved there.
Nets on_test_device(Nets nets);

/// All parameters of all nets, each tensor once.
std::vector<at::Tensor> unique_parameters(const Nets& nets);

}  // namespace tandem::testing
