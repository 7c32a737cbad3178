// tests/cases/accumulation_test.cpp: cases of windows, schedules and loss scales that moved too
// often, too far, or by the wrong divisor.
#include "tests/support/number.h"
#include "tests/support/thread_world.h"

#include <torch/optim/schedulers/step_lr.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::ElementsAre;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The same gradient on all ranks: averages over ranks are that gradient.
void pass(ScaleEngine& net, double gradient = 1.0) { gradient_of(net, gradient).backward(); }

std::vector<int> micro_batches(int count) {
  return std::vector<int>(static_cast<std::size_t>(count));
}

// A step with nothing in it, or a skipped one, was counted by Adam, whose first real update then
// was too small by 1.34384.
TEST(Cases, N13_StepsWithoutGradientsAreNotAdamsFirst) {
  on_ranks(patient(), [](World& world) {
    for (const bool skipped : {false, true}) {
      ScaleEngine net(world, std::make_shared<Scale>(1, 0.0),
                      {.name = "net", .optimizer = Adam{.lr = 0.5}});
      if (skipped) {
        pass(net, kInfinity);
      }
      EXPECT_FALSE(world.step().applied);
      EXPECT_EQ(net.step_count("w"), 0);
      pass(net);
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(net.step_count("w"), 1);
      EXPECT_NEAR(value_of(net), -0.5, 1e-6);  // Adam's first update is lr
    }
  });
}

TEST(Cases, N17_OverflowUnderALossScaleSkipsAllAndHalvesIt) {
  on_ranks(patient(), [](World& world) {
    ScaleEngine net(world, std::make_shared<Scale>(1, 1.0),
                    {.name = "net", .optimizer = AdamW{.lr = 0.5, .weight_decay = 0.1}});
    const double gradient = world.rank() + 1 == world.size() ? 1e38 : 0.0;  // finite without scale
    world.scale(gradient_of(net, gradient)).backward();
    EXPECT_EQ(world.step().reason, StepReason::kNonFinite);
    EXPECT_EQ(value_of(net), 1.0F);  // not even decayed
    EXPECT_EQ(net.step_count("w"), 0);
    EXPECT_EQ(world.loss_scale(), 32768.0);
  });
}

// The norm was divided by the scale that the step had just moved to.
TEST(Cases, N22_NormIsUnscaledByTheScaleThatWasInForce) {
  WorldOptions options = patient();
  options.loss_scaling = {.initial = 16.0, .growth_interval = 1};
  on_ranks(options, [](World& world) {
    auto net = number(world, "net");
    for (const double scale : {16.0, 32.0, 64.0}) {
      world.scale(gradient_of(net, 3.0)).backward();
      const StepResult result = world.step();
      EXPECT_NEAR(result.norm, 3.0, 1e-6);
      EXPECT_EQ(result.loss_scale, scale);
      EXPECT_EQ(world.loss_scale(), 2.0 * scale);
    }
  });
}

TEST(Cases, T15_GradientsAreUnscaledOnce) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    world.scale(gradient_of(net, 4.0)).backward();
    for (int i = 0; i < 2; ++i) {  // looking unscales nothing for good
      EXPECT_NEAR(net.gradient("w").item<float>(), 4.0, 1e-6);
    }
    world.step({.clip_norm = 2.0});
    EXPECT_NEAR(value_of(net), -2.0, 1e-5);
  });
}

/// Learning rates after each window of `windows` x `steps` micro-batches.
std::vector<double> rates(World& world, int windows, int steps, int skipped = -1) {
  auto net = number(world, "net");
  GradientAccumulation accumulation(world, {.steps = steps});
  LearningRateSchedule schedule({&net}, LinearSchedule{.total = windows});
  std::vector<double> seen;
  for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(windows * steps))) {
    pass(net, static_cast<int>(seen.size()) == skipped ? kInfinity : 1.0);
    if (accumulation.boundary()) {
      schedule.advance(world.step());
      seen.push_back(net.learning_rate());
    }
  }
  return seen;
}

TEST(Cases, T7_ASchedulerOfOneProcessEndsWhereItsAuthorMeant) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 4});
    torch::optim::StepLR inner(net.optimizer(), /*step_size=*/16 * world.size() - 1, /*gamma=*/0.5);
    AccumulationScheduler scheduler(inner, accumulation);
    for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(16))) {
      EXPECT_EQ(net.learning_rate(), 1.0);
      pass(net);
      if (accumulation.boundary()) {
        world.step();
      }
      scheduler.step();
    }
    EXPECT_EQ(net.learning_rate(), 0.5);  // moved by 16 on each rank, neither by 16 nor by 4
  });
}

TEST(Cases, T8_LearningRateReachesZeroUnderAccumulation) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THAT(rates(world, 4, 4), ElementsAre(0.75, 0.5, 0.25, 0.0));
  });
}

TEST(Cases, T9_ASchedulerOfUpdatesMovesOncePerUpdate) {
  on_ranks(patient(), [](World& world) {
    for (const int steps : {1, 2, 8}) {
      EXPECT_THAT(rates(world, 2, steps), ElementsAre(0.5, 0.0)) << steps;
    }
  });
}

TEST(Cases, T11_LearningRateIsContinuousOnResume) {
  on_ranks(patient(), [](World& world) {
    const CosineSchedule cosine{.total = 10};
    std::int64_t position = 0;
    double rate = 0.0;
    {
      auto net = number(world, "net");
      LearningRateSchedule schedule({&net}, cosine);
      for (int i = 0; i < 3; ++i) {
        pass(net);
        schedule.advance(world.step());
      }
      position = schedule.position();
      rate = net.learning_rate();
    }
    auto net = number(world, "net");
    LearningRateSchedule schedule({&net}, cosine);
    schedule.set_position(position);
    EXPECT_EQ(net.learning_rate(), rate);
    pass(net);
    schedule.advance(world.step());
    EXPECT_EQ(net.learning_rate(), cosine.at(4));
  });
}

TEST(Cases, T12_OverflowLeavesTheLearningRate) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THAT(rates(world, 4, 2, /*skipped=*/1), ElementsAre(0.75, 0.75, 0.5, 0.25));
  });
}

TEST(Cases, T13_TailIsDividedByWhatItHeld) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 4});
    std::vector<float> seen;
    for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(6))) {
      pass(net, 3.0);
      if (accumulation.boundary()) {
        EXPECT_EQ(world.step().denominator, (seen.empty() ? 4.0 : 2.0) * world.size());
        seen.push_back(value_of(net));
      }
    }
    ASSERT_EQ(seen.size(), 2);
    EXPECT_NEAR(seen[0], -3.0, 1e-6);
    EXPECT_NEAR(seen[1], -6.0, 1e-6);  // and not -4.5
  });
}

TEST(Cases, T14_TailIsAppliedOnce) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 4});
    for (int epoch = 1; epoch <= 2; ++epoch) {
      for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(5))) {
        pass(net);
        if (accumulation.boundary()) {
          world.step();
        }
      }
      EXPECT_EQ(world.updates(), 2 * epoch);
      EXPECT_EQ(world.window(), 0);
    }
    EXPECT_NEAR(value_of(net), -4.0, 1e-5);
  });
}

TEST(Cases, T16_TwoModelsAccumulateTogether) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    GradientAccumulation accumulation(world, {.steps = 2});
    for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(4))) {
      (gradient_of(a, 1.0) + gradient_of(b, 3.0)).backward();
      if (accumulation.boundary()) {
        EXPECT_TRUE(world.step().applied);
      } else {
        EXPECT_EQ(world.window(), 1);
      }
    }
    EXPECT_EQ(world.updates(), 2);
    EXPECT_NEAR(value_of(a), -2.0, 1e-6);
    EXPECT_NEAR(value_of(b), -6.0, 1e-6);
  });
}

TEST(Cases, T17_BackwardNeverSteps) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 2});
    for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(5))) {
      world.backward(gradient_of(net, 1.0));
      EXPECT_EQ(value_of(net), 0.0F);
    }
    EXPECT_EQ(world.updates(), 0);
    EXPECT_EQ(world.window(), 5);
    world.step();
    EXPECT_NEAR(value_of(net), -1.0, 1e-6);
  });
}

TEST(Cases, E18_EvaluationInTheMiddleOfAWindowChangesNothing) {
  on_ranks(patient(), [](World& world) {
    std::optional<std::uint64_t> plain;
    for (const bool evaluates : {false, true}) {
      auto net = number(world, "net");
      GradientAccumulation accumulation(world, {.steps = 3});
      double gradient = 1.0;
      for ([[maybe_unused]] const int& batch : accumulation.epoch(micro_batches(7))) {
        pass(net, gradient *= 1.5);
        if (evaluates) {
          net->eval();
          {
            const torch::NoGradGuard no_grad;
            (void)net.forward(torch::ones({1}));
          }
          (void)net.forward(torch::ones({1}));  // with gradients, its output dropped
          net->train();
        }
        if (accumulation.boundary()) {
          world.step();
        }
      }
      const std::uint64_t hash = world.parameter_hash();
      EXPECT_EQ(plain.value_or(hash), hash);
      plain = hash;
    }
  });
}

}  // namespace
}  // namespace tandem::testing
