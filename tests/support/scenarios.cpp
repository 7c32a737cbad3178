// tests/support/scenarios.cpp: see scenarios.h.
#include "tests/support/scenarios.h"

#include "tests/support/keyed.h"

#include <torch/autograd.h>
#include <torch/nn/functional.h>
#include <torch/types.h>

#include <utility>

namespace tandem::testing {
namespace {

EngineOptions adamw(std::string name, double lr) {
  return {.name = std::move(name), .optimizer = AdamW{.lr = lr, .weight_decay = 0.1}};
}

Nets two_mlps() { return {net_of(mlp(1)), net_of(mlp(2))}; }

at::Tensor loss_of_a(const Nets& nets, const Place& place) {
  return nets[0].forward(batch(place, 0)).to(at::kFloat).square().mean();
}

at::Tensor loss_of_b(const Nets& nets, const Place& place) {
  return (nets[1].forward(batch(place, 1)).to(at::kFloat) - 1.0).square().mean();
}

}  // namespace

at::Tensor batch(const Place& place, int stream) {
  return keyed({4, 8}, key_of({place.step, place.micro_batch(), stream})).to(test_device());
}

Scenario one_engine() {
  Scenario scenario;
  scenario.nets = [] { return Nets{net_of(mlp(1))}; };
  scenario.losses = [](const Nets& nets, const Place& place) {
    return std::vector{loss_of_a(nets, place)};
  };
  scenario.engines = {adamw("a", 1e-2)};
  return scenario;
}

Scenario two_engines_in_one_loss() {
  Scenario scenario;
  scenario.nets = two_mlps;
  scenario.losses = [](const Nets& nets, const Place& place) {
    return std::vector{loss_of_a(nets, place) + loss_of_b(nets, place)};
  };
  scenario.engines = {adamw("a", 1e-2), adamw("b", 3e-3)};
  return scenario;
}

Scenario chained() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor hidden = nets[0].forward(batch(place));
    return std::vector{(nets[1].forward(hidden).to(at::kFloat) - 1.0).square().mean()};
  };
  return scenario;
}

Scenario three_engines_in_one_loss() {
  Scenario scenario;
  scenario.nets = [] {
    NamedTensors head = {{"log_temperature", torch::tensor(-1.0F).requires_grad_()}};
    return Nets{net_of(mlp(1)), net_of(mlp(2)), net_of(std::move(head))};
  };
  scenario.losses = [](const Nets& nets, const Place& place) {
    namespace functional = torch::nn::functional;
    const auto unit = functional::NormalizeFuncOptions().dim(1);
    const at::Tensor images = functional::normalize(nets[0].forward(batch(place, 0)), unit);
    const at::Tensor texts = functional::normalize(nets[1].forward(batch(place, 1)), unit);
    const at::Tensor similarity =
        torch::mm(images, texts.t()) * torch::exp(-nets[2].parameter("log_temperature"));
    const at::Tensor labels = torch::arange(images.size(0), torch::kLong);
    return std::vector{functional::cross_entropy(similarity, labels) +
                       functional::cross_entropy(similarity.t(), labels)};
  };
  scenario.engines = {adamw("images", 1e-2),
                      adamw("texts", 3e-3),
                      {.name = "head", .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.0}}};
  return scenario;
}

Scenario siamese() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor left = nets[0].forward(batch(place, 0));
    const at::Tensor right = nets[0].forward(batch(place, 2));
    return std::vector{(left * right - 1.0).square().mean() + loss_of_b(nets, place)};
  };
  return scenario;
}

Scenario two_losses() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor hidden = nets[0].forward(batch(place));
    return std::vector{(nets[1].forward(hidden) - 1.0).square().mean(), hidden.square().mean()};
  };
  return scenario;
}

Scenario gradient_penalty() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor input = batch(place).requires_grad_();
    const at::Tensor output = nets[1].forward(nets[0].forward(input));
    const at::Tensor gradient =
        torch::autograd::grad({output.square().sum()}, {input}, {}, true, /*create_graph=*/true)[0];
    return std::vector{output.mean() + gradient.square().mean()};
  };
  return scenario;
}

Scenario tied_across_engines() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.nets = [] {
    const auto a = mlp(1);
    const auto b = mlp(2);
    b->first = b->replace_module("first", a->first);
    return Nets{net_of(a), net_of(b)};
  };
  // The first engine owns what is tied, so that one learning rate is right for every reading of
  // "own".
  scenario.engines[1].optimizer = scenario.engines[0].optimizer;
  return scenario;
}

Scenario unused_parameter() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.nets = [] {
    const auto a = mlp(1);
    a->register_parameter("unused", torch::full({16}, 1.0));
    return Nets{net_of(a), net_of(mlp(2))};
  };
  return scenario;
}

Scenario engine_absent_everywhere() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    at::Tensor loss = loss_of_b(nets, place);
    return std::vector{place.step == 1 ? loss : loss + loss_of_a(nets, place)};
  };
  return scenario;
}

Scenario engine_absent_on_some_ranks() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    at::Tensor loss = loss_of_b(nets, place);
    return std::vector{place.step == 1 && place.rank > 0 ? loss : loss + loss_of_a(nets, place)};
  };
  return scenario;
}

Scenario reversed_on_odd_ranks() {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    if (place.rank % 2 == 1) {
      at::Tensor loss = loss_of_b(nets, place);
      return std::vector{loss + loss_of_a(nets, place)};
    }
    at::Tensor loss = loss_of_a(nets, place);
    return std::vector{loss + loss_of_b(nets, place)};
  };
  return scenario;
}

Scenario dealt(Scenario scenario) {
  scenario.average = Average::kMicroBatches;
  scenario.passes = [](int, int, int world_size) { return 12 / world_size; };
  scenario.steps = 4;
  return scenario;
}

Scenario with_sgd(Scenario scenario, double lr, double momentum, double weight_decay) {
  return with(std::move(scenario), &EngineOptions::optimizer,
              Sgd{.lr = lr, .momentum = momentum, .weight_decay = weight_decay});
}

Scenario with_micro_batches(Scenario scenario, int passes) {
  scenario.passes = [passes](int, int, int) { return passes; };
  scenario.average = Average::kMicroBatches;
  return scenario;
}

Scenario with_bucket_bytes(Scenario scenario, std::int64_t bytes) {
  return with(std::move(scenario), &EngineOptions::bucket_bytes, bytes);
}

Scenario with_stage(Scenario scenario, int stage) {
  return with(std::move(scenario), &EngineOptions::stage, stage);
}

Scenario held(Scenario scenario) {
  scenario.hold = [](const Place& place) { return place.pass % 3 != 2; };
  scenario.bitwise = false;
  return with_stage(std::move(scenario), 1);
}

double factor_after(const Place& place, std::size_t net) {
  constexpr double kFactors[] = {0.5, 3.0, 1.0, -0.25, 1.0 / 3.0};
  return kFactors[(static_cast<std::size_t>(3 * place.step + place.pass) + 2 * net) % 5];
}

Scenario multiplied(Scenario scenario) {
  scenario.multiply = [](const Place& place, std::size_t) { return factor_after(place, 0); };
  return scenario;
}

Scenario in_type(Scenario scenario, at::ScalarType dtype, const std::vector<std::size_t>& nets) {
  scenario.nets = [make = scenario.nets, dtype, nets] {
    Nets made = make();
    for (const std::size_t net : nets) {
      made[net].tower->to(dtype);
    }
    return made;
  };
  return scenario;
}

Scenario in_bf16(Scenario scenario, const std::vector<std::size_t>& nets) {
  return in_type(std::move(scenario), at::kBFloat16, nets);
}

}  // namespace tandem::testing
