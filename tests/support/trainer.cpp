// tests/support/trainer.cpp: see trainer.h.
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>

namespace tandem::testing {
namespace {

using TowerEngine = Engine<std::shared_ptr<Tower>>;
using TensorsEngine = Engine<NamedTensors>;

double rate_of(const Optimizer& settings) {
  return std::visit([](const auto& optimizer) { return optimizer.lr; }, settings);
}

}  // namespace

Trainer::Trainer(World& world, Scenario scenario)
    : world_(world), scenario_(std::move(scenario)), nets_(on_test_device(scenario_.nets())) {
  for (std::size_t i = 0; i < nets_.size(); ++i) {
    Net& net = nets_[i];
    if (net.tower) {
      auto engine = std::make_shared<TowerEngine>(world_, net.tower, scenario_.engines[i]);
      net.forward = [weak = std::weak_ptr<TowerEngine>(engine)](const at::Tensor& input) {
        return weak.lock()->forward(input);
      };
      engines_.push_back(engine);
    } else {
      engines_.push_back(
          std::make_shared<TensorsEngine>(world_, net.tensors, scenario_.engines[i]));
    }
  }
}

void Trainer::passes(int index) {
  const int own = scenario_.passes(index, world_.rank(), world_.size());
  for (int pass = 0; pass < scenario_.most_passes(index, world_.size()); ++pass) {
    if (pass < own) {
      micro_batch({index, pass, world_.rank(), world_.size()});
    }
    multiply(index, pass);
  }
}

void Trainer::micro_batch(const Place& place) {
  scenario_.prepare(nets_, place);
  std::optional<Scope> hold;
  if (scenario_.hold(place)) {
    hold.emplace(world_.hold());
  }
  if (scenario_.average == Average::kTokens) {
    world_.count_tokens(scenario_.tokens(place));
  }
  const std::vector<at::Tensor> losses = scenario_.losses(nets_, place);
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const at::Tensor loss = scenario_.loss_scale ? world_.scale(losses[i]) : losses[i];
    const bool retain = i + 1 < losses.size();
    switch (scenario_.call) {
      case BackwardCall::kPlain:
        loss.backward({}, retain);
        break;
      case BackwardCall::kEngine:
        engines_[0]->backward(loss, retain);
        break;
      case BackwardCall::kWorld:
        world_.backward(loss, retain);
        break;
    }
  }
}

void Trainer::multiply(int index, int pass) {
  std::vector<double> factors;
  for (std::size_t net = 0; net < engines_.size(); ++net) {
    factors.push_back(scenario_.multiply({index, pass, world_.rank(), world_.size()}, net));
  }
  if (std::count(factors.begin(), factors.end(), 1.0) == std::ssize(factors)) {
    return;
  }
  if (std::count(factors.begin(), factors.end(), factors[0]) == std::ssize(factors)) {
    return world_.multiply_gradients(factors[0]);
  }
  for (std::size_t net = 0; net < engines_.size(); ++net) {
    engines_[net]->multiply_gradients(factors[net]);
  }
}

StepResult Trainer::step(int index) {
  const double schedule = scenario_.schedule(index);
  if (schedule != last_schedule_) {
    for (std::size_t i = 0; i < engines_.size(); ++i) {
      engines_[i]->set_learning_rate(rate_of(scenario_.engines[i].optimizer) * schedule);
    }
    last_schedule_ = schedule;
  }
  passes(index);
  return world_.step({.clip_norm = scenario_.clip_norm, .norm_type = scenario_.norm_type});
}

void Trainer::run() {
  for (int index = 0; index < scenario_.steps; ++index) {
    step(index);
  }
}

WorldOptions options_for(const Scenario& scenario) {
  WorldOptions options = patient();
  options.average = scenario.average;
  options.loss_scaling.initial = scenario.loss_scale.value_or(options.loss_scaling.initial);
  return options;
}

namespace {

/// Rank 0's oracles; the other ranks only have to hold the same bits as rank 0.
struct Oracles {
  Oracles(const Scenario& scenario, int world_size)
      : split(split_oracle(scenario, world_size)),
        whole(scenario.one_graph ? whole_oracle(scenario, world_size) : nullptr),
        bits(functor_oracle(scenario, world_size)) {}

  std::unique_ptr<Oracle> split;
  std::unique_ptr<Oracle> whole;
  std::unique_ptr<Oracle> bits;
};

}  // namespace

Distances train_beside_oracles(World& world, const Scenario& scenario) {
  Trainer trainer(world, scenario);
  std::optional<Oracles> oracles;
  if (world.rank() == 0) {
    oracles.emplace(scenario, world.size());
  }
  const std::vector<at::Tensor> start = copies(trainer.parameters());
  Distances result;
  for (const at::Tensor& parameter : start) {
    result.in_16_bits = result.in_16_bits || parameter.element_size() == 2;
  }
  for (int index = 0; index < scenario.steps; ++index) {
    const std::vector<at::Tensor> before = copies(trainer.parameters());
    const StepResult step = trainer.step(index);
    result.all_applied = result.all_applied && step.applied;
    if (!oracles) {
      continue;
    }
    if (result.in_16_bits) {
      // A 16-bit parameter that differs by its last bit changes all later gradients: from equal
      // state.
      oracles->split->adopt(before);
    }
    oracles->split->step(index, step.clip_factor);
    oracles->bits->step(index, step.clip_factor);
    if (oracles->whole) {
      oracles->whole->step(index, step.clip_factor);
    }
    result.split = std::max(result.split,
                            distance(trainer.parameters(), oracles->split->parameters(), before));
    const double norm = oracles->split->norm();
    if (std::isfinite(norm) && norm > 0.0) {
      result.norm = std::max(result.norm, std::abs(step.norm / norm - 1.0));
    }
    for (std::size_t net = 0; net < step.engines.size(); ++net) {
      result.denominator =
          std::max(result.denominator,
                   std::abs(step.engines[net].denominator - oracles->split->denominators()[net]));
    }
  }
  if (oracles) {
    if (oracles->whole) {
      const std::vector<at::Tensor> movement = difference(oracles->whole->parameters(), start);
      result.whole = distance(trainer.parameters(), oracles->whole->parameters(), movement);
    }
    result.bits = differing_bits(trainer.parameters(), oracles->bits->parameters());
  }
  // Exact in a double: 32 bits at a time.
  const std::uint64_t hash = world.parameter_hash();
  const double low = static_cast<double>(hash & 0xFFFFFFFFU);
  const double high = static_cast<double>(hash >> 32);
  result.ranks_agree = world.broadcast(low) == low && world.broadcast(high) == high;
  return result;
}

void expect_within_contract(World& world, const Scenario& scenario) {
  const Distances distances = train_beside_oracles(world, scenario);
  EXPECT_TRUE(distances.all_applied);
  EXPECT_TRUE(distances.ranks_agree);
  // The same double quotients on both sides.
  EXPECT_EQ(distances.denominator, 0.0);
  // Squares of fp32 numbers summed in double on both sides, in different orders, before one square
  // root; sums that were taken in another order than the oracle's differ by fp32 rounding.
  EXPECT_LE(distances.norm, 1e-6);
  // fp32: 20 steps. 16 bits: one step each; an fp32 difference of one part in 10^7 tips the
  // rounding of few elements, by one unit, the largest of which is bf16's (2^-8 of the element):
  // below 1 in 1,000 of the norm.
  EXPECT_LE(distances.split, distances.in_16_bits ? 1e-3 : 1e-6);
  EXPECT_LE(distances.whole, distances.in_16_bits ? 5e-2 : 1e-5);
  if (scenario.bitwise) {
    EXPECT_EQ(distances.bits, 0);
  }
}

void check(const Scenario& scenario, int smallest) {
  on_ranks(
      options_for(scenario), [&](World& world) { expect_within_contract(world, scenario); },
      smallest);
}

std::uint64_t trained_hash(World& world, const Scenario& scenario) {
  Trainer trainer(world, scenario);
  trainer.run();
  return world.parameter_hash();
}

std::uint64_t trained_hash_on_threads(int size, const Scenario& scenario, WorldOptions options) {
  options.average = scenario.average;
  std::mutex mutex;
  std::vector<std::uint64_t> hashes;
  on_threads(size, options, [&](World& world) {
    const std::uint64_t hash = trained_hash(world, scenario);
    const std::lock_guard lock(mutex);
    hashes.push_back(hash);
  });
  for (const std::uint64_t hash : hashes) {
    EXPECT_EQ(hash, hashes.front()) << "ranks of one world disagree";
  }
  return hashes.empty() ? 0 : hashes.front();
}

void expect_same_bits(const Scenario& scenario) {
  const std::uint64_t expected = trained_hash_on_threads(1, scenario, patient());
  on_ranks(options_for(scenario),
           [&](World& world) { EXPECT_EQ(trained_hash(world, scenario), expected); });
  if (launched_ranks() == 1) {
    EXPECT_EQ(trained_hash_on_threads(4, scenario, patient()), expected);
  }
}

}  // namespace tandem::testing
