// tandem/engine_optimizer.h: an engine as a torch::optim::Optimizer, for LibTorch's own schedulers
// and for code that holds an optimizer.
#pragma once

#include <tandem/optimizer.h>
#include <tandem/report.h>

#include <torch/optim/optimizer.h>

#include <string>
#include <tuple>
#include <vector>

namespace tandem {

class EngineBase;

namespace engine {
struct EngineState;
}  // namespace engine

/// What param_groups()[i].options() of an engine with Lion are; LibTorch has no Lion. Those of the
/// others are LibTorch's: AdamWOptions, AdamOptions, SGDOptions, RMSpropOptions, AdagradOptions.
class LionOptions : public torch::optim::OptimizerCloneableOptions<LionOptions> {
 public:
  explicit LionOptions(double lr = 1e-4) : lr_(lr) {}

  [[nodiscard]] double lr() const { return lr_; }
  LionOptions& lr(double lr) {
    lr_ = lr;
    return *this;
  }
  [[nodiscard]] const std::tuple<double, double>& betas() const { return betas_; }
  LionOptions& betas(const std::tuple<double, double>& betas) {
    betas_ = betas;
    return *this;
  }
  [[nodiscard]] double weight_decay() const { return weight_decay_; }
  LionOptions& weight_decay(double weight_decay) {
    weight_decay_ = weight_decay;
    return *this;
  }
  [[nodiscard]] double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }

 private:
  double lr_;
  std::tuple<double, double> betas_{0.9, 0.99};
  double weight_decay_ = 0.0;
};

/// EngineBase::optimizer(): made at its first call, which communicates nothing; lives as long as
/// the engine. param_groups() are the engine's groups in their order, the engine's own settings
/// first, with the parameters themselves.
///
/// Learning rate and weight decay of param_groups()[i].options() and the engine's own
/// (set_learning_rate(), set_weight_decay()) are one value: what was set last is what the next step
/// uses and what both show, the same on all ranks, as compared at the step. Here a group is set
/// alone: groups that follow the engine's settings do not follow what is set here for the first
/// group. A negative rate or NaN, another changed setting (betas, momentum), a replaced options
/// object, and groups or parameters added or taken away are refused by the next step of the world,
/// on all ranks alike, with all windows discarded, until they are put right.
///
/// `.grad` is not used and state() stays empty: moments are shards. So torch's clip_grad_norm_
/// finds nothing: clip by World::step().
///
/// Thread safety: as World.
class EngineOptimizer : public torch::optim::Optimizer {
 public:
  ~EngineOptimizer() override;
  EngineOptimizer(const EngineOptimizer&) = delete;
  EngineOptimizer& operator=(const EngineOptimizer&) = delete;
  EngineOptimizer(EngineOptimizer&&) = delete;
  EngineOptimizer& operator=(EngineOptimizer&&) = delete;

  /// Runs `closure`, if there is one, with gradients enabled, then World::step() of this engine
  /// alone, without clipping. Returns the closure's loss, undefined without one. Collective.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// What the last step() did; as made before the first.
  [[nodiscard]] const StepResult& last_result() const { return last_result_; }

  /// EngineBase::zero_grad(): empties the engine's window. Collective. Hides the base's, which is
  /// not virtual: called through torch::optim::Optimizer& that one finds no `.grad` and does
  /// nothing, which is right in the usual order (zero_grad, backward, step), because a step leaves
  /// the window empty.
  void zero_grad();

  /// Refused with InvalidArgument: the states are spread over the ranks, and there are no
  /// checkpoints yet. torch::save(engine.ptr(), file) saves parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  friend class EngineBase;
  explicit EngineOptimizer(engine::EngineState& state);

  std::string exchange();  // settings with the engine's, under the world's lock; what is wrong

  engine::EngineState& state_;
  std::vector<tandem::Optimizer> shown_;  // of each group, as of the last exchange
  StepResult last_result_;
};

}  // namespace tandem
