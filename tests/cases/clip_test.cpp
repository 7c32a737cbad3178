// Cases: one engine clipped alone, or one rank by its own norm, where one joint norm and one factor
// are right.
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tandem::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

ScaleEngine vector_of(World& world, const char* name, std::int64_t numel) {
  return {world, std::make_shared<Scale>(numel, 0.0), {.name = name, .optimizer = Sgd{.lr = 1.0}}};
}

at::Tensor gradient_of(ScaleEngine& engine, const std::vector<float>& gradient) {
  return engine.forward(torch::tensor(gradient)).sum();
}

// Engines with gradients [3] and [4] reported one norm for both; each has its own, and 5 is the
// joint one.
TEST(Cases, N2_NormsPerEngineAndJoint) {
  on_ranks(patient(), [](World& world) {
    auto a = vector_of(world, "a", 1);
    auto b = vector_of(world, "b", 1);
    (gradient_of(a, {3}) + gradient_of(b, {4})).backward();
    const StepResult result = world.step({.clip_norm = 100.0});
    ASSERT_EQ(result.engines.size(), 2U);
    EXPECT_EQ(result.engines[0].norm, 3.0);
    EXPECT_EQ(result.engines[1].norm, 4.0);
    EXPECT_EQ(result.norm, 5.0);
  });
}

// With another expert on each rank the norms of the ranks were averaged: sqrt(20) on one and
// sqrt(100) on the other became 7.236; it is sqrt(120) = 10.954.
TEST(Cases, N3_JointNormOfExpertsThatEachLiveOnOneRank) {
  WorldOptions options = patient();
  options.average = Average::kNone;
  on_exactly(2, options, [](World& world) {
    auto left = vector_of(world, "left", 2);
    auto right = vector_of(world, "right", 2);
    const at::Tensor loss =
        world.rank() == 0 ? gradient_of(left, {2, 4}) : gradient_of(right, {6, 8});
    loss.backward();
    const double norm = std::sqrt(120.0);
    const StepResult result = world.step({.clip_norm = norm / 2.0});
    EXPECT_NEAR(result.norm, norm, 1e-9);
    EXPECT_NEAR(result.clip_factor, 0.5, 1e-6);
    // Both experts by the same factor, on both ranks.
    EXPECT_TRUE(torch::allclose(left->w, torch::tensor({-1.0F, -2.0F}), 1e-6));
    EXPECT_TRUE(torch::allclose(right->w, torch::tensor({-3.0F, -4.0F}), 1e-6));
  });
}

// Each group and rank clipped by a coefficient of its own (a norm of 4.02 where 40.20 was meant).
// One large and one small engine: the ratio of their updates is that of their gradients.
TEST(Cases, N5_OneCoefficientForAllEnginesAndRanks) {
  on_ranks(patient(), [](World& world) {
    auto large = vector_of(world, "large", 1);
    auto small = vector_of(world, "small", 1);
    (gradient_of(large, {40}) + gradient_of(small, {4})).backward();
    const StepResult result = world.step({.clip_norm = 1.0});
    const double norm = std::sqrt(40.0 * 40.0 + 4.0 * 4.0);  // 40.20
    EXPECT_NEAR(result.norm, norm, 1e-6);
    EXPECT_NEAR(large->w.item<double>(), -40.0 / norm, 1e-6);
    EXPECT_NEAR(small->w.item<double>(), -4.0 / norm, 1e-6);
    EXPECT_NEAR(world.mean(result.clip_factor), result.clip_factor, 0.0);
  });
}

// The right norm was reported while the gradients were left as they were: parameters are what
// counts.
TEST(Cases, N6_ParametersAreClippedNotOnlyTheReport) {
  Scenario clipped = with_sgd(two_engines_in_one_loss(), 0.1);
  clipped.steps = 1;
  clipped.clip_norm = 0.01;
  on_ranks(options_for(clipped), [&](World& world) {
    Trainer trainer(world, clipped);
    const auto before = copies(trainer.parameters());
    const StepResult result = trainer.step(0);
    ASSERT_GT(result.norm, 0.02);
    // SGD moves by lr * gradient: the movement's norm is lr * clip_norm.
    EXPECT_NEAR(distance(trainer.parameters(), before, {torch::ones({1})}), 0.1 * 0.01, 1e-7);
  });
  check(clipped);
}

// The same for norms of other types: the p-norm of SGD's movement is lr * clip_norm.
TEST(Cases, N6_ParametersAreClippedByNormsOfEveryType) {
  for (const double p : {0.5, 1.0, 3.0, kInfinity}) {
    Scenario clipped = with_sgd(two_engines_in_one_loss(), 1.0);
    clipped.steps = 1;
    clipped.norm_type = p;
    on_ranks(options_for(clipped), [&](World& world) {
      Scenario scenario = clipped;
      scenario.clip_norm = Trainer(world, clipped).step(0).norm / 4.0;
      {
        Trainer trainer(world, scenario);
        const auto before = copies(trainer.parameters());
        const StepResult result = trainer.step(0);
        std::vector<at::Tensor> moved;
        for (const at::Tensor& tensor : difference(trainer.parameters(), before)) {
          moved.push_back(tensor.reshape({-1}));
        }
        const double movement = torch::norm(torch::cat(moved), p).item<double>();
        EXPECT_NEAR(movement / *scenario.clip_norm, 1.0, 1e-4) << "p " << p;
        EXPECT_NEAR(result.clip_factor, 0.25, 1e-5);
      }
      expect_within_contract(world, scenario);  // torch::nn::utils::clip_grad_norm_
    });
  }
}

// A rank without gradients, which owns none of the parameter either, broke norms of types infinity
// (the maximum of nothing) and 3: it contributes 0.
TEST(Cases, N7_ARankWithoutGradientsContributesZero) {
  WorldOptions options = patient();
  options.average = Average::kNone;
  struct Norm {
    double p;
    double value;  // of 3, -4, 5
  };
  const Norm norms[] = {{kInfinity, 5.0}, {3.0, 6.0}, {1.0, 12.0}};
  for (const Norm& norm : norms) {
    for (const bool other_engine : {false, true}) {  // or no pass at all
      on_ranks(options, [&](World& world) {
        auto net = vector_of(world, "net", 3);
        auto other = vector_of(world, "other", 1);
        const int last = world.size() - 1;
        if (world.rank() == last) {
          gradient_of(net, {3, -4, 5}).backward();
        } else if (other_engine) {
          gradient_of(other, {0}).backward();
        }
        const StepResult result = world.step({.clip_norm = norm.value / 2, .norm_type = norm.p});
        EXPECT_TRUE(result.applied);
        EXPECT_NEAR(result.norm, norm.value, 1e-14);
        EXPECT_NEAR(result.engines[0].norm, norm.value, 1e-14);
        EXPECT_EQ(result.engines[1].norm, 0.0);
        EXPECT_TRUE(torch::allclose(net->w, torch::tensor({-1.5F, 2.0F, -2.5F}), 1e-6));
        EXPECT_EQ(other->w.item<float>(), 0.0F);
      });
    }
  }
}

// A norm of -1, which meant "not finite", became a negative factor and turned gradients round. Here
// a norm is never negative, whatever the sign of gradients and multipliers, and one that is not
// finite changes nothing.
TEST(Cases, N22_ANormIsNeverNegativeAndNegatesNothing) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
    on_ranks(patient(), [&](World& world) {
      auto a = vector_of(world, "a", 2);
      auto b = vector_of(world, "b", 1);
      for (const float bad : {infinity, -infinity, nan}) {
        const float here = world.rank() == world.size() - 1 ? bad : 1.0F;
        (gradient_of(a, {here, 1}) + gradient_of(b, {1})).backward();
        const StepResult result = world.step({.clip_norm = 0.5, .norm_type = p});
        EXPECT_EQ(result.reason, StepReason::kNonFinite);
        EXPECT_TRUE(std::isnan(result.norm));
        EXPECT_FALSE(result.engines[0].finite);
        EXPECT_TRUE(result.engines[1].finite);
        EXPECT_NEAR(result.engines[1].norm, 1.0, 1e-7);
        EXPECT_EQ(result.clip_factor, 1.0);
        EXPECT_TRUE(a->w.eq(0).all().item<bool>());
        EXPECT_EQ(b->w.item<float>(), 0.0F);
      }
      gradient_of(b, {-2}).backward();
      const StepResult down = world.step({.clip_norm = 1.0, .norm_type = p});
      EXPECT_NEAR(down.norm, 2.0, 1e-6);
      EXPECT_NEAR(down.clip_factor, 0.5, 1e-6);
      EXPECT_NEAR(b->w.item<double>(), 1.0, 1e-6);
      gradient_of(b, {-2}).backward();
      b.multiply_gradients(-1.0);
      EXPECT_NEAR(world.step({.clip_norm = 1.0, .norm_type = p}).norm, 2.0, 1e-6);
      EXPECT_NEAR(b->w.item<double>(), 0.0, 1e-6);
    });
  }
}

// One bf16 infinity went into Adam's moments and stayed there; on one rank alone it also split the
// ranks.
TEST(Cases, N17_InfinityOnOneRankSkipsAllAndPoisonsNothing) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const float infinity = std::numeric_limits<float>::infinity();
    on_ranks(patient(), [&](World& world) {
      Engine a(world, std::make_shared<Scale>(2, 1.0, dtype),
               {.name = "a", .optimizer = AdamW{.lr = 0.1}});
      Engine b(world, std::make_shared<Scale>(2, 1.0),
               {.name = "b", .optimizer = AdamW{.lr = 0.1}});
      const auto pass = [&](float factor) {
        const at::Tensor input = torch::tensor({factor, 1.0F});
        (a.forward(input).to(at::kFloat).sum() + b.forward(torch::ones({2})).sum()).backward();
      };
      const std::uint64_t start = world.parameter_hash();
      pass(1.0F);
      pass(world.rank() == 0 ? infinity : 1.0F);
      const StepResult skipped = world.step();
      EXPECT_EQ(skipped.reason, StepReason::kNonFinite);
      EXPECT_EQ(world.parameter_hash(), start);
      EXPECT_EQ(a.step_count("w") + b.step_count("w"), 0);
      pass(1.0F);
      EXPECT_TRUE(world.step().applied);
      // The first AdamW update, of gradient 1: with a moment or a count left over it would be
      // another. 1 * (1 - 0.1 * 0.01) - 0.1 = 0.899; bf16 there is spaced 2^-8 = 0.0039.
      const double bound = dtype == at::kFloat ? 1e-6 : 0.002;
      EXPECT_NEAR(a->w[0].item<double>(), 0.899, bound);
      EXPECT_NEAR(b->w[0].item<double>(), 0.899, 1e-6);
    });
  }
}

// The reported norm depended on the stage, and on how many micro-batches the same gradient was made
// of.
TEST(Cases, N26_NormIsTheSameForStagesAndWindowLengths) {
  const auto norm_of = [](World& world, double p, int stage, int passes) {
    Scenario scenario = with_stage(with_micro_batches(two_engines_in_one_loss(), passes), stage);
    scenario.norm_type = p;
    scenario.losses = [plain = scenario.losses](const Nets& nets, const Place& place) {
      return plain(nets, {0, 0, place.rank, place.world_size});  // the same micro-batch again
    };
    Trainer trainer(world, scenario);
    return trainer.step(0).norm;
  };
  WorldOptions options = patient();
  options.average = Average::kMicroBatches;
  on_ranks(options, [&](World& world) {
    for (const double p : {0.5, 1.0, 2.0, 3.0, kInfinity}) {
      const double norm = norm_of(world, p, 2, 1);
      EXPECT_GT(norm, 0.0);
      EXPECT_EQ(norm_of(world, p, 1, 1), norm);
      // Twice and four times the sum, over twice and four times the pairs: exact but for rounding
      // of the sum of unequal ranks, which adds in another order.
      EXPECT_NEAR(norm_of(world, p, 2, 2) / norm, 1.0, 1e-6) << p;
      EXPECT_NEAR(norm_of(world, p, 1, 4) / norm, 1.0, 1e-6) << p;
    }
  });
}

}  // namespace
}  // namespace tandem::testing
