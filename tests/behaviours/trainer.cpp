// tests/behaviours/trainer.cpp: see trainer.h.
#include "tests/behaviours/trainer.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace behaviours {
namespace {

// Elementwise bounds cannot be tight in general: AdamW turns the sign of a gradient that is nearly
// zero into a whole step. The seeds of the table make no such element, and rounding moves the
// others by a few 1e-6 of their movement; a gradient twice as large moves AdamW's by 1e-4, through
// eps alone.
constexpr double kLargestRelative = 2e-5;

tandem::WorldOptions world_options(const Scenario& scenario) {
  tandem::WorldOptions options;
  options.timeout = std::chrono::seconds(20);
  if (scenario.divide == Divide::kRanksAndPasses) options.average = tandem::Average::kMicroBatches;
  return options;
}

tandem::Optimizer optimizer(const Scenario& scenario) {
  if (scenario.adamw) {
    return tandem::AdamW{.lr = scenario.lr, .weight_decay = scenario.weight_decay};
  }
  return tandem::Sgd{.lr = scenario.lr};
}

Models made(const Scenario& scenario) {
  Models models = scenario.make();
  for (const auto& model : models) model->to(scenario.dtype);
  return models;
}

double largest(const Tensor& values) { return values.abs().max().item<double>(); }

/// Collective.
double largest_of_ranks(tandem::World& world, double value) {
  double result = 0.0;
  for (int rank = 0; rank < world.size(); ++rank) {
    result = std::max(result, world.broadcast(value, rank));
  }
  return result;
}

/// Collective. A double carries 32 bits exactly, so the hash travels in two halves.
bool same_parameters(tandem::World& world) {
  const std::uint64_t hash = world.parameter_hash();
  const auto low = static_cast<double>(hash & 0xffffffffU);
  const auto high = static_cast<double>(hash >> 32);
  const double low_of_0 = world.broadcast(low);
  const double high_of_0 = world.broadcast(high);
  return !world.any(low != low_of_0 || high != high_of_0);
}

}  // namespace

Trainer::Trainer(const Scenario& scenario)
    : scenario_(scenario),
      world_(tandem::World::from_environment(world_options(scenario))),
      models_(made(scenario)) {
  for (const auto& model : models_) {
    engines_.push_back(std::make_unique<tandem::Engine<std::shared_ptr<Model>>>(
        world_, model, tandem::EngineOptions{.optimizer = optimizer(scenario)}));
    calls_.push_back(
        [engine = engines_.back().get()](const Tensor& x) { return engine->forward(x); });
  }
  initial_ = snapshot(models_);
}

void Trainer::pass(int step, int pass) {
  const std::vector<Tensor> losses = scenario_.losses(calls_, {step, pass, rank()});
  for (std::size_t i = 0; i < losses.size(); ++i) {
    losses[i].backward({}, /*retain_graph=*/i + 1 < losses.size());
  }
}

tandem::StepResult Trainer::step() { return world_.step({.clip_norm = scenario_.clip_norm}); }

void Trainer::train() {
  for (int at = 0; at < scenario_.steps; ++at) {
    for (int i = 0; i < scenario_.passes; ++i) pass(at, i);
    step();
  }
}

Verdict Trainer::compare(const std::vector<Tensor>& expected) { return compare(expected, ""); }

Verdict Trainer::compare(const std::vector<Tensor>& expected, const std::string& found_here) {
  Verdict verdict;
  const std::vector<Tensor> got = snapshot(models_);
  bool finite = true;
  for (std::size_t i = 0; i < got.size(); ++i) {
    finite = finite && got[i].isfinite().all().item<bool>();
    const double difference = largest(got[i] - expected[i]);
    // A parameter that must not move at all has a movement of next to nothing.
    const double movement = std::max(largest(expected[i] - initial_[i]), 1e-6);
    verdict.difference = std::max(verdict.difference, difference);
    verdict.relative = std::max(verdict.relative, difference / movement);
  }
  verdict.difference = largest_of_ranks(world_, verdict.difference);
  verdict.relative = largest_of_ranks(world_, verdict.relative);

  const auto note = [&](const std::string& text) {
    verdict.what_is_wrong += (verdict.what_is_wrong.empty() ? "" : "; ") + text;
  };
  if (world_.any(!found_here.empty())) {
    note(found_here.empty() ? "another rank found something wrong" : found_here);
  }
  if (world_.any(!finite)) note("parameters are not finite");
  if (!same_parameters(world_)) note("parameters differ between ranks");
  if (!(verdict.relative <= kLargestRelative)) note("differs from the oracle");
  verdict.ok = verdict.what_is_wrong.empty();
  return verdict;
}

Verdict run(const Scenario& scenario) {
  Trainer trainer(scenario);
  trainer.train();
  return trainer.compare(train_unsharded(scenario, trainer.ranks()));
}

}  // namespace behaviours
