// tests/behaviours/scenario.cpp: the models of the table and the oracle. Slow and obvious on
// purpose.
#include "tests/behaviours/scenario.h"

#include <cmath>
#include <set>
#include <utility>

namespace behaviours {

Mlp::Mlp(std::uint64_t seed) : Mlp(seed, Tensor()) {}

Mlp::Mlp(std::uint64_t seed, Tensor tied_weight1) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto uniform = [&](at::IntArrayRef shape, int inputs) {
    const double bound = 1.0 / std::sqrt(inputs);
    return torch::empty(shape).uniform_(-bound, bound, generator);
  };
  if (!tied_weight1.defined()) tied_weight1 = uniform({16, 8}, 8);
  weight1 = register_parameter("weight1", tied_weight1);
  bias1 = register_parameter("bias1", uniform({16}, 8));
  weight2 = register_parameter("weight2", uniform({8, 16}, 16));
  bias2 = register_parameter("bias2", uniform({8}, 16));
}

Tensor Mlp::forward(const Tensor& x) {
  const Tensor typed = x.to(weight1.dtype());
  return torch::linear(torch::gelu(torch::linear(typed, weight1, bias1)), weight2, bias2);
}

MlpWithUnused::MlpWithUnused(std::uint64_t seed) : Mlp(seed) {
  register_parameter("unused", torch::ones({16}));
}

Scale::Scale(double value) { weight = register_parameter("weight", torch::full({2}, value)); }

Tensor Scale::forward(const Tensor& x) { return weight * x.to(weight.dtype()); }

Tensor input(const Moment& at, int which) {
  const auto key = static_cast<std::uint64_t>(100'000 * at.step + 1'000 * at.pass + 10 * at.rank);
  return torch::randn({4, 8}, at::make_generator<at::CPUGeneratorImpl>(key + which));
}

std::vector<Tensor> snapshot(const Models& models) {
  std::vector<Tensor> values;
  for (const auto& model : models) {
    for (const Tensor& parameter : model->parameters()) {
      values.push_back(parameter.detach().to(torch::kFloat).clone());
    }
  }
  return values;
}

std::vector<Tensor> train_unsharded(const Scenario& scenario, int ranks) {
  const Models models = scenario.make();
  Calls calls;
  std::vector<Tensor> parameters;  // a tied one once
  std::set<const void*> seen;
  for (const auto& model : models) {
    calls.push_back([model](const Tensor& x) { return model->forward(x); });
    for (const Tensor& parameter : model->parameters()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
    }
  }

  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (scenario.adamw) {
    optimizer = std::make_unique<torch::optim::AdamW>(
        parameters, torch::optim::AdamWOptions(scenario.lr).weight_decay(scenario.weight_decay));
  } else {
    optimizer =
        std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(scenario.lr));
  }

  const double divisor =
      scenario.divide == Divide::kRanks ? ranks : double(ranks) * scenario.passes;
  for (int step = 0; step < scenario.steps; ++step) {
    for (int pass = 0; pass < scenario.passes; ++pass) {
      for (int rank = 0; rank < ranks; ++rank) {
        Tensor total = torch::zeros({});
        for (const Tensor& loss : scenario.losses(calls, {step, pass, rank})) total = total + loss;
        (total / divisor).backward();
      }
    }
    if (scenario.clip_norm) torch::nn::utils::clip_grad_norm_(parameters, *scenario.clip_norm);
    optimizer->step();
    optimizer->zero_grad();  // leaves .grad undefined: an absent parameter is no zero gradient
  }

  std::vector<Tensor> values = snapshot(models);
  for (Tensor& value : values) value = value.to(scenario.dtype).to(torch::kFloat);
  return values;
}

}  // namespace behaviours
