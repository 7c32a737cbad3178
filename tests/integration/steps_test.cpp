// tests/integration/steps_test.cpp: the joint step: who steps, by which factor, and when nothing
// may change.
#include "tests/support/keyed.h"
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

namespace tandem::testing {
namespace {

TEST(Step, ReportsWhatItDid) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    // Rank r brings 3 + r and 4 + r; the mean of r over W ranks is (W - 1) / 2.
    const double mean = (world.size() - 1) / 2.0;
    (gradient_of(a, 3.0 + world.rank()) + gradient_of(b, 4.0 + world.rank())).backward();
    EXPECT_EQ(world.window(), 1);
    const StepResult result = world.step();
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(result.reason, StepReason::kApplied);
    EXPECT_EQ(result.updates, 1);
    EXPECT_EQ(result.denominator, world.size());
    EXPECT_EQ(result.clip_factor, 1.0);
    ASSERT_EQ(result.engines.size(), 2U);
    EXPECT_EQ(result.engines[0].name, "a");
    EXPECT_EQ(result.engines[1].name, "b");
    EXPECT_NEAR(result.engines[0].norm, 3.0 + mean, 1e-6);
    EXPECT_NEAR(result.engines[1].norm, 4.0 + mean, 1e-6);
    EXPECT_NEAR(result.norm, std::hypot(3.0 + mean, 4.0 + mean), 1e-6);
    for (const EngineStep& engine : result.engines) {
      EXPECT_EQ(engine.passes, 1);
      EXPECT_EQ(engine.parameters, 1);
      EXPECT_TRUE(engine.finite);
    }
    EXPECT_EQ(world.window(), 0);
    EXPECT_FLOAT_EQ(value_of(a), static_cast<float>(-3.0 - mean));
  });
}

TEST(Step, ClipsByTheJointNorm) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    (gradient_of(a, 3.0) + gradient_of(b, 4.0)).backward();
    const StepResult result = world.step({.clip_norm = 1.0});
    // As torch's clip_grad_norm_: 1 / (5 + 1e-6).
    EXPECT_NEAR(result.clip_factor, 0.2, 1e-6);
    EXPECT_NEAR(result.norm, 5.0, 1e-9) << "reported before clipping";
    EXPECT_NEAR(value_of(a), -0.6F, 1e-6);
    EXPECT_NEAR(value_of(b), -0.8F, 1e-6);
  });
}

TEST(Step, LargerBoundDoesNotClip) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    gradient_of(a, 3.0).backward();
    EXPECT_EQ(world.step({.clip_norm = 100.0}).clip_factor, 1.0);
    EXPECT_EQ(value_of(a), -3.0F);
  });
}

TEST(Step, OfOneEngineLeavesTheOthersWindowAlone) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    (gradient_of(a, 3.0) + gradient_of(b, 4.0)).backward();
    const StepResult first = world.step({.engines = {&a}});
    EXPECT_EQ(first.norm, 3.0) << "of the engines of this step";
    ASSERT_EQ(first.engines.size(), 1U);
    EXPECT_EQ(value_of(a), -3.0F);
    EXPECT_EQ(value_of(b), 0.0F);
    const StepResult second = world.step({.engines = {&b}});
    EXPECT_TRUE(second.applied);
    EXPECT_EQ(second.updates, 2);
    EXPECT_EQ(value_of(a), -3.0F);
    EXPECT_EQ(value_of(b), -4.0F);
    EXPECT_EQ(world.step().reason, StepReason::kEmpty);
  });
}

TEST(Step, SeparateStepsEqualTheJointOneWithoutClipping) {
  const Scenario scenario = two_engines_in_one_loss();
  on_ranks(patient(), [&](World& world) {
    std::uint64_t joint = 0;
    {
      Trainer trainer(world, scenario);
      for (int i = 0; i < 5; ++i) {
        trainer.step(i);
      }
      joint = world.parameter_hash();
    }
    Trainer trainer(world, scenario);
    for (int i = 0; i < 5; ++i) {
      trainer.passes(i);
      world.step({.engines = {&trainer.engine(1)}});
      world.step({.engines = {&trainer.engine(0)}});
    }
    EXPECT_EQ(world.parameter_hash(), joint);
  });
}

TEST(Step, WithoutAPassIsEmptyAndChangesNothing) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 1.0),
               {.optimizer = AdamW{.lr = 0.1, .weight_decay = 0.5}});
    for (int i = 0; i < 2; ++i) {
      const StepResult result = world.step({.clip_norm = 1.0});
      EXPECT_FALSE(result.applied);
      EXPECT_EQ(result.reason, StepReason::kEmpty);
      EXPECT_EQ(result.updates, 0);
    }
    EXPECT_EQ(net->w.item<float>(), 1.0F);
  });
}

TEST(Step, RefusesBadOptionsAndKeepsTheWindow) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    gradient_of(a, 3.0).backward();
    for (const double bad : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_THROW(world.step({.clip_norm = bad}), InvalidArgument) << bad;
    }
    EXPECT_THROW(world.step({.engines = {&a, &a}}), InvalidArgument);
    EXPECT_EQ(world.window(), 1);
    world.step();
    EXPECT_EQ(value_of(a), -3.0F);
  });
}

TEST(Step, DifferentEnginesOnDifferentRanksIsAMismatchEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        auto a = number(world, "a");
        auto b = number(world, "b");
        (gradient_of(a, 3.0) + gradient_of(b, 4.0)).backward();
        EngineBase* mine = world.rank() == 0 ? static_cast<EngineBase*>(&a) : &b;
        EXPECT_THROW(world.step({.engines = {mine}}), Mismatch);
        // Nothing has changed, and the windows are still there.
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(a), -3.0F);
        EXPECT_EQ(value_of(b), -4.0F);
      },
      2);
}

TEST(Step, DifferentLearningRatesAreAMismatchEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        auto a = number(world, "a");
        gradient_of(a, 3.0).backward();
        a.set_learning_rate(world.rank() == 0 ? 0.5 : 0.25);
        try {
          world.step();
          ADD_FAILURE() << "a step with two learning rates";
        } catch (const Mismatch& mismatch) {
          EXPECT_NE(std::string(mismatch.what()).find("a"), std::string::npos);
        }
        EXPECT_EQ(value_of(a), 0.0F);
        a.set_learning_rate(0.5);
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(a), -1.5F);
      },
      2);
}

TEST(Step, SettersTakeEffectAndRefuseNonsense) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a", 2.0);
    a.set_learning_rate(0.5);
    a.set_weight_decay(0.25);
    EXPECT_EQ(a.learning_rate(), 0.5);
    EXPECT_EQ(a.weight_decay(), 0.25);
    for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
      EXPECT_THROW(a.set_learning_rate(bad), InvalidArgument);
      EXPECT_THROW(a.set_weight_decay(bad), InvalidArgument);
    }
    gradient_of(a, 3.0).backward();
    world.step();
    // 2 - 0.5 * (3 + 0.25 * 2)
    EXPECT_EQ(value_of(a), 0.25F);
  });
}

TEST(Step, NonFiniteGradientOnOneRankSkipsEverywhere) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double poison : {infinity, nan}) {
    on_ranks(patient(), [&](World& world) {
      Engine a(world, std::make_shared<Scale>(3, 1.0),
               {.name = "a", .optimizer = AdamW{.lr = 0.1, .weight_decay = 0.5}});
      auto b = number(world, "b");
      const auto pass = [&](double factor) {
        const at::Tensor input = torch::full({3}, factor, torch::kFloat32);
        (a.forward(input).sum() + gradient_of(b, 4.0)).backward();
      };
      const bool last = world.rank() + 1 == world.size();
      pass(last ? poison : 1.0);
      const StepResult skipped = world.step({.clip_norm = 1.0});
      EXPECT_FALSE(skipped.applied);
      EXPECT_EQ(skipped.reason, StepReason::kNonFinite);
      EXPECT_EQ(skipped.updates, 0);
      ASSERT_EQ(skipped.engines.size(), 2U);
      EXPECT_FALSE(skipped.engines[0].finite);
      EXPECT_TRUE(skipped.engines[1].finite);
      EXPECT_TRUE(a->w.eq(1.0).all().item<bool>());
      EXPECT_EQ(value_of(b), 0.0F);
      EXPECT_EQ(a.step_count("w"), 0);
      EXPECT_EQ(world.window(), 0);

      pass(1.0);
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(a.step_count("w"), 1);
      EXPECT_EQ(value_of(b), -4.0F);
      // First AdamW update of gradient 1: 1 * (1 - 0.1 * 0.5) - 0.1 * 1.
      EXPECT_NEAR(a->w[0].item<float>(), 0.85F, 1e-6);
    });
  }
}

TEST(ZeroGrad, EmptiesAllWindows) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    (gradient_of(a, 3.0) + gradient_of(b, 4.0)).backward();
    world.zero_grad();
    EXPECT_EQ(world.window(), 0);
    EXPECT_EQ(world.step().reason, StepReason::kEmpty);
    gradient_of(a, 1.0).backward();
    world.step();
    EXPECT_EQ(value_of(a), -1.0F);
    EXPECT_EQ(value_of(b), 0.0F);
  });
}

TEST(ZeroGrad, OfOneEngineKeepsTheOther) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    (gradient_of(a, 3.0) + gradient_of(b, 4.0)).backward();
    a.zero_grad();
    const StepResult result = world.step();
    EXPECT_EQ(value_of(a), 0.0F);
    EXPECT_EQ(value_of(b), -4.0F);
    EXPECT_EQ(result.engines[0].passes, 0);
  });
}

// Rank 0 clears while the others already step: it goes first, behind all that was launched.
TEST(ZeroGrad, IsJoinedByRanksAtTheirStep) {
  on_ranks(
      patient(),
      [](World& world) {
        auto a = number(world, "a");
        gradient_of(a, 3.0).backward();
        if (world.rank() == 0) {
          world.zero_grad();
        }
        EXPECT_EQ(world.step().reason, StepReason::kEmpty);
        EXPECT_EQ(value_of(a), 0.0F);
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
