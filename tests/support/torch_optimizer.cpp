// tests/support/torch_optimizer.cpp: see torch_optimizer.h.
#include "tests/support/torch_optimizer.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <utility>
#include <variant>
#include <vector>

namespace tandem::testing {
namespace {

std::unique_ptr<torch::optim::Optimizer> stepper_of(at::Tensor master, const AdamW& o) {
  return std::make_unique<torch::optim::AdamW>(std::vector{std::move(master)},
                                               torch::optim::AdamWOptions(o.lr)
                                                   .betas({o.beta1, o.beta2})
                                                   .eps(o.eps)
                                                   .weight_decay(o.weight_decay)
                                                   .amsgrad(o.amsgrad));
}

std::unique_ptr<torch::optim::Optimizer> stepper_of(at::Tensor master, const Adam& o) {
  return std::make_unique<torch::optim::Adam>(std::vector{std::move(master)},
                                              torch::optim::AdamOptions(o.lr)
                                                  .betas({o.beta1, o.beta2})
                                                  .eps(o.eps)
                                                  .weight_decay(o.weight_decay)
                                                  .amsgrad(o.amsgrad));
}

std::unique_ptr<torch::optim::Optimizer> stepper_of(at::Tensor master, const Sgd& o) {
  return std::make_unique<torch::optim::SGD>(std::vector{std::move(master)},
                                             torch::optim::SGDOptions(o.lr)
                                                 .momentum(o.momentum)
                                                 .dampening(o.dampening)
                                                 .weight_decay(o.weight_decay)
                                                 .nesterov(o.nesterov));
}

std::unique_ptr<torch::optim::Optimizer> stepper_of(at::Tensor master, const RmsProp& o) {
  return std::make_unique<torch::optim::RMSprop>(std::vector{std::move(master)},
                                                 torch::optim::RMSpropOptions(o.lr)
                                                     .alpha(o.alpha)
                                                     .eps(o.eps)
                                                     .weight_decay(o.weight_decay)
                                                     .momentum(o.momentum)
                                                     .centered(o.centered));
}

std::unique_ptr<torch::optim::Optimizer> stepper_of(at::Tensor master, const Adagrad& o) {
  return std::make_unique<torch::optim::Adagrad>(
      std::vector{std::move(master)}, torch::optim::AdagradOptions(o.lr)
                                          .lr_decay(o.lr_decay)
                                          .weight_decay(o.weight_decay)
                                          .initial_accumulator_value(o.initial_accumulator_value)
                                          .eps(o.eps));
}

/// Chen et al., 2023, algorithm 2, line by line.
class LionStepper : public torch::optim::Optimizer {
 public:
  LionStepper(at::Tensor master, const Lion& lion)
      : torch::optim::Optimizer(
            {torch::optim::OptimizerParamGroup({std::move(master)})},
            std::make_unique<torch::optim::SGDOptions>(lion.lr)),  // only its learning rate is used
        lion_(lion) {}

  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    const at::NoGradGuard no_grad;
    torch::optim::OptimizerParamGroup& group = param_groups()[0];
    at::Tensor theta = group.params()[0];
    const at::Tensor gradient = theta.grad();
    if (!gradient.defined()) {
      return {};
    }
    if (!momentum_.defined()) {
      momentum_ = torch::zeros_like(theta);
    }
    const at::Tensor c = lion_.beta1 * momentum_ + (1.0 - lion_.beta1) * gradient;
    theta.sub_(group.options().get_lr() * (torch::sign(c) + lion_.weight_decay * theta));
    momentum_ = lion_.beta2 * momentum_ + (1.0 - lion_.beta2) * gradient;
    return {};
  }

 private:
  Lion lion_;
  at::Tensor momentum_;
};

std::unique_ptr<torch::optim::Optimizer> stepper_of(at::Tensor master, const Lion& o) {
  return std::make_unique<LionStepper>(std::move(master), o);
}

}  // namespace

std::unique_ptr<torch::optim::Optimizer> torch_optimizer_of(const at::Tensor& parameter,
                                                            const Optimizer& settings) {
  return std::visit([&](const auto& o) { return stepper_of(parameter, o); }, settings);
}

}  // namespace tandem::testing
