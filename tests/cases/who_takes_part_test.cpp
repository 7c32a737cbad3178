// Cases: engines, parameters and submodules that take part twice, late, on some ranks or not at
// all.
#include "tests/support/keyed.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tandem::testing {
namespace {

// A Linear(8, 8) is used through the engine and once more directly, in one backward: gradients of
// one use were counted twice or lost.
TEST(Cases, N1_SubmoduleUsedTwiceInOneBackward) {
  Scenario scenario = one_engine();
  scenario.nets = [] { return Nets{net_of(std::make_shared<Mlp>(8, 8, 8, 1))}; };
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor once = nets[0].forward(batch(place));
    const at::Tensor twice = nets[0].tower->forward(once);
    return std::vector{(twice - 1.0).square().mean()};
  };
  check(with_micro_batches(scenario, 2));
}

// Each rank uses an expert of its own; the others count as zeros there, and nobody waits for them.
TEST(Cases, E5_EachRankUsesItsOwnExpert) {
  Scenario scenario;
  scenario.nets = [] {
    Nets nets;
    for (std::uint64_t expert = 0; expert < 4; ++expert) {
      nets.push_back(net_of(mlp(expert)));
    }
    return nets;
  };
  scenario.losses = [](const Nets& nets, const Place& place) {
    const auto expert = static_cast<std::size_t>(place.rank + place.step) % nets.size();
    return std::vector{nets[expert].forward(batch(place)).square().mean()};
  };
  for (int expert = 0; expert < 4; ++expert) {
    scenario.engines.push_back({.name = "expert" + std::to_string(expert),
                                .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1}});
  }
  check(scenario);
}

// Rank 1 builds the sum of losses in reverse, so its gradients come in another order.
TEST(Cases, E6_SumBuiltInReverseOnSomeRanks) {
  check(with_bucket_bytes(reversed_on_odd_ranks(), 1));
  check(with_sgd(with_micro_batches(reversed_on_odd_ranks(), 2), 0.5));
}

// The parameter registered last is frozen and the only one of its type: its bucket never completes.
TEST(Cases, E8_FrozenLastParameterOfItsOwnType) {
  Scenario scenario = one_engine();
  scenario.nets = [] {
    const auto a = mlp(1);
    a->register_parameter("last", torch::ones({40}, at::kBFloat16), /*requires_grad=*/false);
    return Nets{net_of(a)};
  };
  check(with_micro_batches(scenario, 2));
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    trainer.run();
    EXPECT_TRUE(trainer.nets()[0].parameter("last").eq(1.0).all().item<bool>());
  });
}

// Frozen in the middle of a run: it must not move, not even by decay, and go on when thawed.
TEST(Cases, E9_FrozenParameterDoesNotMove) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.steps = 6;
  scenario.one_graph = false;
  scenario.prepare = [](const Nets& nets, const Place& place) {
    nets[0].parameter("first.weight").set_requires_grad(place.step < 2 || place.step >= 4);
  };
  check(scenario);
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    for (int step = 0; step < scenario.steps; ++step) {
      const auto before = copies({trainer.nets()[0].parameter("first.weight")});
      trainer.step(step);
      const std::int64_t moved =
          differing_bits(before, {trainer.nets()[0].parameter("first.weight")});
      const bool frozen = step >= 2 && step < 4;
      EXPECT_EQ(moved == 0, frozen) << step;
    }
    EXPECT_EQ(trainer.engine(0).step_count("first.weight"), 4);
  });
}

// A weight tied inside one engine was stepped twice; across two engines the two halves went apart.
TEST(Cases, E13_TiedInsideOneEngine) {
  Scenario scenario = one_engine();
  scenario.nets = [] {
    const auto a = std::make_shared<Mlp>(8, 8, 8, 1);
    a->second = a->replace_module("second", a->first);
    return Nets{net_of(a)};
  };
  scenario.clip_norm = 0.05;  // counted once in the norm, too
  check(scenario);
}

TEST(Cases, E13_TiedAcrossTwoEngines) {
  Scenario scenario = tied_across_engines();
  scenario.clip_norm = 0.05;
  check(scenario);
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    trainer.run();
    const auto& nets = trainer.nets();
    EXPECT_TRUE(nets[0].parameter("first.weight").is_same(nets[1].parameter("first.weight")));
  });
}

TEST(Cases, E15_EngineAbsentOnAllRanks) { check(engine_absent_everywhere()); }

TEST(Cases, E15_EngineAbsentOnOneRank) {
  check(engine_absent_on_some_ranks(), 2);
  check(with_micro_batches(engine_absent_on_some_ranks(), 2), 2);
}

}  // namespace
}  // namespace tandem::testing
