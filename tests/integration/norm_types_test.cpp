// tests/integration/norm_types_test.cpp: steps clipped by norms other than the 2-norm: as torch's
// clip_grad_norm_ in one process, with the same bits for every number of ranks and cut, at the
// price that StepOptions says.
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Clipped to a third of the first step's norm.
Scenario clipped(World& world, Scenario scenario) {
  Trainer trainer(world, scenario);
  scenario.clip_norm = trainer.step(0).norm / 3.0;
  return scenario;
}

TEST(NormTypes, ClipAsTorchDoes) {
  for (const Scenario& loop :
       {one_engine(), two_engines_in_one_loss(), three_engines_in_one_loss()}) {
    for (const int stage : {1, 2}) {
      for (const bool bf16 : {false, true}) {
        for (const double p : {0.5, 1.0, 2.5, 3.0, kInfinity}) {
          SCOPED_TRACE(std::to_string(loop.engines.size()) + " engines, stage " +
                       std::to_string(stage) + (bf16 ? ", bf16" : ", fp32") + ", p " +
                       std::to_string(p));
          Scenario scenario = with_stage(with_sgd(loop, 0.5), stage);
          if (bf16) {
            scenario = in_bf16(scenario, loop.engines.size() == 1 ? std::vector<std::size_t>{0}
                                                                  : std::vector<std::size_t>{0, 1});
          }
          scenario.norm_type = p;
          scenario.steps = 4;
          on_ranks(options_for(scenario),
                   [&](World& world) { expect_within_contract(world, clipped(world, scenario)); });
        }
      }
    }
  }
}

TEST(NormTypes, ClipMicroBatchesAsTorchDoes) {
  for (const double p : {1.0, 3.0, kInfinity}) {
    Scenario scenario = with_micro_batches(with_sgd(chained(), 0.5), 3);
    scenario.norm_type = p;
    scenario.steps = 4;
    on_ranks(options_for(scenario),
             [&](World& world) { expect_within_contract(world, clipped(world, scenario)); });
  }
}

/// All norms of some steps.
std::vector<double> norms_of(World& world, const Scenario& scenario) {
  Trainer trainer(world, scenario);
  std::vector<double> norms;
  for (int index = 0; index < scenario.steps; ++index) {
    const StepResult result = trainer.step(index);
    norms.push_back(result.norm);
    for (const EngineStep& engine : result.engines) {
      norms.push_back(engine.norm);
    }
  }
  return norms;
}

TEST(NormTypes, HaveTheSameBitsOnAnyNumberOfRanksAndForAnyBuckets) {
  for (const double p : {0.5, 1.0, 2.5, 3.0, 100.0, kInfinity}) {
    Scenario scenario = dealt(two_engines_in_one_loss());
    scenario.nets = [] {  // of several blocks
      return Nets{net_of(std::make_shared<Mlp>(8, 257, 8, 1)),
                  net_of(std::make_shared<Mlp>(8, 384, 8, 2))};
    };
    scenario.norm_type = p;
    scenario.clip_norm = 1e-3;
    scenario.steps = 2;
    std::vector<double> expected;
    on_threads(1, options_for(scenario),
               [&](World& world) { expected = norms_of(world, scenario); });
    for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{5000}, std::int64_t{1} << 30}) {
      const Scenario cut = with_bucket_bytes(scenario, bytes);
      const auto same = [&](World& world) {
        EXPECT_EQ(norms_of(world, cut), expected)
            << "p " << p << ", " << bytes << " bytes, " << world.size() << " ranks";
      };
      on_ranks(options_for(cut), same);
      if (launched_ranks() == 1) {
        on_threads(4, options_for(cut), same);
      }
    }
  }
}

TEST(NormTypes, OfEnginesMakeUpTheJointOne) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    auto c = number(world, "c");  // never seen
    const auto step = [&](double p) {
      (gradient_of(a, 3.0) + gradient_of(b, -4.0)).backward();
      return world.step({.norm_type = p});
    };
    EXPECT_EQ(step(1.0).norm, 7.0);
    EXPECT_EQ(step(2.0).norm, 5.0);
    EXPECT_NEAR(step(3.0).norm, std::cbrt(27.0 + 64.0), 1e-14);
    EXPECT_NEAR(step(0.5).norm, std::pow(std::sqrt(3.0) + 2.0, 2.0), 1e-14);
    EXPECT_EQ(step(1000.0).norm, 4.0);  // (3 / 4)^1000 is nothing
    const StepResult result = step(kInfinity);
    EXPECT_EQ(result.norm, 4.0);
    EXPECT_EQ(result.engines[0].norm, 3.0);
    EXPECT_EQ(result.engines[1].norm, 4.0);
    EXPECT_EQ(result.engines[2].norm, 0.0);
  });
}

TEST(NormTypes, NeitherOverflowNorVanish) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(4, 0.0),
               {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    for (const double p : {1.0, 3.0, 100.0, 1000.0}) {
      for (const double value : {0x1p-149, 0x1p-126, 1.0, 0x1p100}) {
        net.forward(torch::full({4}, value / world.size(), torch::kFloat64).to(torch::kFloat32))
            .sum()
            .backward();
        const StepResult result = world.step({.norm_type = p});
        EXPECT_TRUE(result.applied);
        if (world.size() != 3 && value >= 0x1p-126) {  // where the division is exact
          const double expected = value / world.size() * std::pow(4.0, 1.0 / p);
          EXPECT_NEAR(result.norm / expected, 1.0, 1e-14) << p << ", " << value;
        }
      }
    }
  });
}

/// Rounds of a pass and its step.
std::int64_t rounds_of(World& world, ScaleEngine& net, double p) {
  const std::int64_t before = world.wire_report().control_rounds;
  gradient_of(net, 1.0).backward();
  world.step({.clip_norm = 1.0, .norm_type = p});
  return world.wire_report().control_rounds - before;
}

TEST(NormTypes, TakeOneMoreRoundOnlyWhereTheLargestComesFirst) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        rounds_of(world, net, 2.0);  // also settles what the first pass agrees on
        const std::int64_t rounds = rounds_of(world, net, 2.0);
        for (const double p : {0.5, 1.0, kInfinity, 2.0}) {
          EXPECT_EQ(rounds_of(world, net, p), rounds) << p;
        }
        for (const double p : {1.5, 3.0, 100.0}) {
          EXPECT_EQ(rounds_of(world, net, p), rounds + 1) << p;
        }
      },
      2);
}

TEST(NormTypes, ThatAreNoneAreRefusedAndKeepTheWindow) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    gradient_of(a, 3.0).backward();
    for (const double bad :
         {0.0, -0.0, -1.0, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_NE(refusal([&] { world.step({.norm_type = bad}); }).find("norm_type"),
                std::string::npos)
          << bad;
    }
    EXPECT_EQ(world.window(), 1);
    world.step({.norm_type = kInfinity});
    EXPECT_EQ(value_of(a), -3.0F);
  });
}

TEST(NormTypes, ThatDifferAreAMismatchEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        auto a = number(world, "a");
        gradient_of(a, 3.0).backward();
        try {
          world.step({.clip_norm = 1.0, .norm_type = world.rank() == 0 ? 3.0 : kInfinity});
          ADD_FAILURE() << "a step with two norm types";
        } catch (const Mismatch& mismatch) {
          const std::string text = mismatch.what();
          EXPECT_NE(text.find("norm_type 3"), std::string::npos) << text;
          EXPECT_NE(text.find("norm_type inf"), std::string::npos) << text;
        }
        EXPECT_EQ(value_of(a), 0.0F);
        EXPECT_TRUE(world.step({.norm_type = 3.0}).applied);
        EXPECT_EQ(value_of(a), -3.0F);
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
