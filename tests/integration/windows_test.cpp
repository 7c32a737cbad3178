// tests/integration/windows_test.cpp: what a window is summed from and divided by: averages,
// several passes, uneven ranks, stages and hold, types, frozen parameters.
#include "tests/support/keyed.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>

namespace tandem::testing {
namespace {

Scenario with_average(Scenario scenario, Average average) {
  scenario.average = average;
  return scenario;
}

/// Two of `passes` micro-batches and more for low ranks, so that the last rank runs one fewer.
Scenario uneven(Scenario scenario, int passes) {
  scenario.passes = [passes](int, int rank, int world_size) {
    return rank + 1 == world_size && world_size > 1 ? passes - 1 : passes;
  };
  return scenario;
}

TEST(Windows, OfOneTwoAndFourPasses) {
  for (const int passes : {1, 2, 4}) {
    SCOPED_TRACE(passes);
    Scenario scenario = with_micro_batches(two_engines_in_one_loss(), passes);
    check(scenario);
    check(with_average(scenario, Average::kRanks));
  }
}

TEST(Windows, ChainedWithFourPasses) { check(with_micro_batches(with_sgd(chained(), 0.5), 4)); }

TEST(Windows, SumsAreNotDividedWithNone) {
  check(with_average(with_micro_batches(two_engines_in_one_loss(), 2), Average::kNone));
}

TEST(Windows, TokensDivideByAllTokensOfAllRanks) {
  Scenario scenario =
      with_average(with_micro_batches(two_engines_in_one_loss(), 2), Average::kTokens);
  scenario.tokens = [](const Place& place) { return 3 + 5 * place.micro_batch(); };
  check(scenario);
}

// W ranks, the last with one pass fewer: the divisor of ranks is pairs / passes = (2 W - 1) / 2.
TEST(Windows, UnevenRanks) {
  for (const Average average : {Average::kRanks, Average::kMicroBatches, Average::kNone}) {
    SCOPED_TRACE(static_cast<int>(average));
    Scenario scenario = two_engines_in_one_loss();
    scenario.average = average;
    check(uneven(scenario, 2), 2);
  }
  Scenario scenario = uneven(two_engines_in_one_loss(), 2);
  scenario.steps = 1;
  on_ranks(
      options_for(scenario),
      [&](World& world) {
        Trainer trainer(world, scenario);
        EXPECT_EQ(trainer.step(0).denominator, (2.0 * world.size() - 1.0) / 2.0);
      },
      2);
}

// A rank without any pass of a step still takes its part in it.
TEST(Windows, RankWithoutAnyPass) { check(uneven(two_engines_in_one_loss(), 1), 2); }

TEST(Windows, ShortLastWindowDividesByWhatItHeld) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.average = Average::kMicroBatches;
  scenario.steps = 3;
  scenario.passes = [](int step, int, int) { return step == 2 ? 1 : 4; };
  check(scenario);
}

TEST(Windows, StageOneEqualsStageTwo) {
  const Scenario scenario = with_micro_batches(chained(), 2);
  check(with_stage(scenario, 1));
  on_ranks(options_for(scenario), [&](World& world) {
    EXPECT_EQ(trained_hash(world, with_stage(scenario, 1)),
              trained_hash(world, with_stage(scenario, 2)));
  });
}

/// All but the last pass of a window are held.
Scenario held(Scenario scenario, int passes) {
  scenario = with_stage(with_micro_batches(std::move(scenario), passes), 1);
  scenario.hold = [passes](const Place& place) { return place.pass + 1 < passes; };
  scenario.bitwise = false;
  return scenario;
}

TEST(Windows, HeldPassesAreSummedLocally) {
  check(held(two_engines_in_one_loss(), 4));
  check(held(chained(), 2));
  // bf16: the held sum is fp32 and travels in fp32.
  check(in_bf16(held(two_engines_in_one_loss(), 4), {0, 1}));
}

// Everything of the window is held: it travels with the step.
TEST(Windows, AllPassesHeld) {
  Scenario scenario = held(two_engines_in_one_loss(), 2);
  scenario.hold = [](const Place&) { return true; };
  check(scenario);
}

// One rank does not hold: nothing is held in that pass, so the sums are taken in (pass, rank)
// order.
TEST(Windows, HoldOnSomeRanksOnlyIsNotHonoured) {
  Scenario scenario = held(two_engines_in_one_loss(), 2);
  scenario.hold = [](const Place& place) { return place.rank == 0; };
  scenario.bitwise = true;
  check(scenario, 2);
}

TEST(Windows, HoldLeavesStageTwoAlone) {
  Scenario scenario = with_stage(held(two_engines_in_one_loss(), 2), 2);
  scenario.bitwise = true;
  check(scenario);
}

// Held, then a rank that runs out of data: what it holds is launched with the others' passes.
TEST(Windows, HeldOnUnevenRanks) { check(uneven(held(two_engines_in_one_loss(), 3), 3), 2); }

TEST(Windows, HeldPassesTravelOnce) {
  Scenario scenario = held(one_engine(), 4);
  scenario.steps = 2;
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    trainer.step(0);
    const std::int64_t launches = world.wire_report().launches;
    trainer.step(1);
    EXPECT_EQ(world.wire_report().launches - launches, trainer.engine(0).buckets());
  });
}

TEST(Windows, Bf16AndMixedTypes) {
  const Scenario scenario = with_micro_batches(two_engines_in_one_loss(), 2);
  check(in_bf16(scenario, {0, 1}));
  check(in_bf16(scenario, {1}));
  check(in_bf16(with_sgd(scenario, 0.1, 0.9), {0}));
}

TEST(Windows, BothTypesInsideOneEngine) {
  Scenario scenario = one_engine();
  scenario.nets = [] {
    const auto a = mlp(1);
    a->second->to(at::kBFloat16);
    return Nets{net_of(a)};
  };
  scenario.losses = [](const Nets& nets, const Place& place) {
    const auto input = batch(place);
    const at::Tensor hidden = torch::tanh(
        at::linear(input, nets[0].parameter("first.weight"), nets[0].parameter("first.bias")));
    const at::Tensor output =
        at::linear(hidden.to(at::kBFloat16), nets[0].parameter("second.weight"),
                   nets[0].parameter("second.bias"));
    return std::vector{output.to(at::kFloat).square().mean()};
  };
  check(scenario);
  check(with_bucket_bytes(scenario, 1));
}

TEST(Windows, BucketsFromOneParameterEachToAllInOne) {
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{4096}, std::int64_t{1} << 30}) {
    SCOPED_TRACE(bytes);
    check(with_bucket_bytes(with_micro_batches(three_engines_in_one_loss(), 2), bytes));
  }
  on_ranks(patient(), [](World& world) {
    // Two weights and two biases.
    EXPECT_EQ(Trainer(world, with_bucket_bytes(one_engine(), 1)).engine(0).buckets(), 4);
    EXPECT_EQ(Trainer(world, one_engine()).engine(0).buckets(), 1);
  });
}

TEST(Windows, ParametersOfManyBlocks) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.nets = [] {
    return Nets{net_of(std::make_shared<Mlp>(8, 257, 8, 1)),
                net_of(std::make_shared<Mlp>(8, 128, 8, 2))};
  };
  scenario.steps = 10;
  check(with_bucket_bytes(scenario, 1));
  check(scenario);
}

TEST(Windows, LearningRateSetBetweenSteps) {
  Scenario scenario = chained();
  scenario.schedule = [](int step) { return 0.5 * (1.0 + std::cos(0.3 * step)); };
  check(scenario);
  check(with_sgd(scenario, 0.1, 0.9, 0.01));
}

TEST(Windows, ClippedJointly) {
  Scenario scenario = with_micro_batches(two_engines_in_one_loss(), 2);
  scenario.clip_norm = 0.05;
  check(scenario);
  check(in_bf16(scenario, {0}));
}

void set_frozen(const Net& net, const std::string& parameter, bool frozen) {
  net.parameter(parameter).set_requires_grad(!frozen);
}

TEST(Windows, ParameterFrozenAndThawedBetweenSteps) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.prepare = [](const Nets& nets, const Place& place) {
    set_frozen(nets[0], "second.bias", place.step % 2 == 1);
    set_frozen(nets[1], "first.weight", place.step % 3 == 0);
  };
  scenario.one_graph = false;
  check(scenario);
}

TEST(Windows, ParameterFrozenInsideAWindow) {
  Scenario scenario = with_micro_batches(two_engines_in_one_loss(), 3);
  scenario.prepare = [](const Nets& nets, const Place& place) {
    set_frozen(nets[0], "second.weight", place.pass == 1);
  };
  scenario.one_graph = false;
  check(scenario);
}

TEST(Windows, ParameterFrozenOnOneRankOnly) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.prepare = [](const Nets& nets, const Place& place) {
    set_frozen(nets[0], "second.weight", place.rank == 0);
  };
  scenario.one_graph = false;
  check(scenario, 2);
  check(with_bucket_bytes(scenario, 1), 2);
}

TEST(Windows, EngineFrozenAsAWhole) {
  Scenario scenario = chained();
  scenario.prepare = [](const Nets& nets, const Place&) {
    for (const NamedTensor& parameter : nets[1].parameters()) {
      parameter.tensor.set_requires_grad(false);
    }
  };
  check(scenario);
}

// The published fixture of token averaging: two ranks, two micro-batches each, tokens [[5, 10],
// [20, 3]], gradients per token [[1, 2], [3, 4]]: (5 * 1 + 10 * 2 + 20 * 3 + 3 * 4) / (5 + 10 + 20
// + 3) = 97 / 38. Means of means would give 2.5 and other values.
TEST(Windows, TokenFixtureGives97Over38) {
  constexpr std::int64_t kTokenCounts[2][2] = {{5, 10}, {20, 3}};
  constexpr double kPerToken[2][2] = {{1, 2}, {3, 4}};
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_exactly(2, options, [&](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 0.0),
               {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    for (int pass = 0; pass < 2; ++pass) {
      const std::int64_t tokens = kTokenCounts[world.rank()][pass];
      world.count_tokens(tokens);
      const at::Tensor per_token = torch::full({tokens}, kPerToken[world.rank()][pass]);
      (net.forward(torch::ones({1})) * per_token).sum().backward();
    }
    const StepResult result = world.step();
    EXPECT_EQ(result.denominator, 38.0);
    // One division in fp32.
    EXPECT_FLOAT_EQ(net->w.item<float>(), static_cast<float>(-97.0 / 38.0));
    EXPECT_NEAR(result.norm, 97.0 / 38.0, 1e-6);
  });
}

TEST(Windows, TokensOfOneEngineAreItsOwn) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(options, [](World& world) {
    Engine a(world, std::make_shared<Scale>(1, 0.0), {.name = "a", .optimizer = Sgd{.lr = 1.0}});
    Engine b(world, std::make_shared<Scale>(1, 0.0), {.name = "b", .optimizer = Sgd{.lr = 1.0}});
    a.count_tokens(2);
    b.count_tokens(4);
    (8.0 * (a.forward(torch::ones({1})) + b.forward(torch::ones({1})))).sum().backward();
    const StepResult result = world.step();
    // W gradients of 8 over W counts of 2, and of 4.
    EXPECT_EQ(a->w.item<float>(), -4.0F);
    EXPECT_EQ(b->w.item<float>(), -2.0F);
    EXPECT_EQ(result.denominator, 0.0) << "two different divisors are not one";
    ASSERT_EQ(result.engines.size(), 2U);
    EXPECT_EQ(result.engines[0].denominator, 2.0 * world.size());
    EXPECT_EQ(result.engines[1].denominator, 4.0 * world.size());
  });
}

TEST(Windows, TokensNeverCountedIsAnErrorOnAllRanks) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(options, [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 0.0), {.optimizer = Sgd{.lr = 1.0}});
    net.forward(torch::full({1}, 6.0F)).sum().backward();
    EXPECT_THROW(world.step(), Error);
    // The window stands: W gradients of 6, and now 3 tokens of each rank.
    world.count_tokens(3);
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(net->w.item<float>(), -2.0F);
  });
}

TEST(Windows, CountedAndZeroTokensSkipTheStepAsEmpty) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(options, [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 1.0),
               {.optimizer = AdamW{.lr = 0.1, .weight_decay = 0.1}});
    world.count_tokens(0);
    net.forward(torch::full({1}, 6.0F)).sum().backward();
    const StepResult result = world.step();
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.reason, StepReason::kEmpty);
    EXPECT_EQ(result.updates, 0);
    EXPECT_EQ(net->w.item<float>(), 1.0F);
    EXPECT_EQ(net.step_count("w"), 0);
    EXPECT_EQ(world.window(), 0);
  });
}

// One rank's tokens are zero (all masked), the others' are not.
TEST(Windows, ZeroTokensOnOneRank) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(
      options,
      [](World& world) {
        Engine net(world, std::make_shared<Scale>(1, 0.0), {.optimizer = Sgd{.lr = 1.0}});
        const bool masked = world.rank() == 0;
        world.count_tokens(masked ? 0 : 2);
        net.forward(torch::full({1}, masked ? 0.0F : 6.0F)).sum().backward();
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(net->w.item<float>(), -3.0F);
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
