// tests/integration/loss_scale_test.cpp: World::scale(): the rules of torch.amp.GradScaler for a
// world, whose one scale all engines and ranks share.
#include "tests/support/models.h"
#include "tests/support/number.h"
#include "tests/support/thread_world.h"

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

constexpr double kInfinity = std::numeric_limits<double>::infinity();

WorldOptions sums(const LossScaling& scaling = {}) {
  WorldOptions options = patient();
  options.average = Average::kNone;
  options.loss_scaling = scaling;
  return options;
}

/// Scaled; on the last rank alone.
void pass(World& world, ScaleEngine& net, double gradient) {
  world.scale(gradient_of(net, world.rank() + 1 == world.size() ? gradient : 0.0)).backward();
}

TEST(LossScale, IsUndoneByTheStep) {
  on_ranks(sums(), [](World& world) {
    auto net = number(world, "net");
    EXPECT_EQ(world.loss_scale(), 1.0);
    const at::Tensor loss = gradient_of(net, world.rank() == 0 ? 3.0 : 0.0);
    const at::Tensor scaled = world.scale(loss);
    EXPECT_EQ(scaled.item<float>(), 65536.0F * loss.item<float>());
    EXPECT_EQ(world.loss_scale(), 65536.0);  // already
    scaled.backward();
    EXPECT_EQ(net.gradient("w").item<float>(), 3.0F);
    const StepResult result = world.step({.clip_norm = 6.0});
    EXPECT_EQ(result.norm, 3.0);
    EXPECT_EQ(result.clip_factor, 1.0);
    EXPECT_EQ(result.loss_scale, 65536.0);
    EXPECT_EQ(world.loss_scale(), 65536.0);
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

TEST(LossScale, InfinityOnOneRankSkipsEveryEngineEverywhereAndHalvesIt) {
  on_ranks(sums(), [](World& world) {
    auto a = number(world, "a", 1.0);
    auto b = number(world, "b", 2.0);
    const double bad = world.rank() == 0 ? kInfinity : 1.0;
    world.scale(gradient_of(a, 1.0) + gradient_of(b, bad)).backward();
    const StepResult result = world.step();
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.reason, StepReason::kNonFinite);
    EXPECT_EQ(result.loss_scale, 65536.0);
    EXPECT_EQ(world.loss_scale(), 32768.0);
    EXPECT_EQ(world.updates(), 0);
    EXPECT_EQ(value_of(a), 1.0F);
    EXPECT_EQ(value_of(b), 2.0F);
    EXPECT_EQ(a.step_count("w"), 0);
    pass(world, a, 1.0);
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(a), 0.0F);
  });
}

// Of GradScaler: the growth tracker counts applied steps and is reset by a skipped one.
TEST(LossScale, GrowsAfterAppliedStepsInARow) {
  on_ranks(sums({.initial = 8.0, .growth_interval = 3}), [](World& world) {
    auto net = number(world, "net");
    struct Row {
      double gradient;
      bool empty;
      double scale;  // afterwards
    };
    const Row rows[] = {{1, false, 8},  {1, false, 8},  {0, true, 8},  // counts for nothing
                        {1, false, 16},                                // the third
                        {1, false, 16}, {1, false, 16}, {kInfinity, false, 8},  // begins anew
                        {1, false, 8},  {1, false, 8},  {1, false, 16}};
    for (const Row& row : rows) {
      if (!row.empty) {
        pass(world, net, row.gradient);
      }
      world.step();
      EXPECT_EQ(world.loss_scale(), row.scale);
    }
    EXPECT_EQ(value_of(net), -8.0F);
  });
}

TEST(LossScale, WindowsThatAreOpenFollowIt) {
  for (const bool grows : {false, true}) {
    for (const bool hold : {false, true}) {
      on_ranks(sums({.initial = 4.0, .growth_interval = grows ? 1 : 1000}), [&](World& world) {
        auto a = number(world, "a");
        auto b = number(world, "b");
        {
          const std::optional<Scope> scope =
              hold ? std::optional<Scope>(world.hold()) : std::optional<Scope>();
          pass(world, b, 3.0);
        }
        pass(world, a, grows ? 1.0 : kInfinity);
        EXPECT_EQ(world.step({.engines = {&a}}).applied, grows);
        EXPECT_EQ(world.loss_scale(), grows ? 8.0 : 2.0);
        EXPECT_EQ(b.gradient("w").item<float>(), 3.0F);
        pass(world, b, 5.0);
        const StepResult result = world.step();
        EXPECT_EQ(result.norm, 8.0);
        EXPECT_EQ(value_of(b), -8.0F);
      });
    }
  }
}

/// Parameters' hash after training of two engines, several micro-batches an update.
std::uint64_t trained(World& world, bool scaled, int micro_batches) {
  Engine a(world, std::make_shared<Scale>(5, 0.25), {.name = "a", .optimizer = AdamW{.lr = 0.1}});
  Engine b(world, std::make_shared<Scale>(3, -0.5), {.name = "b", .optimizer = Sgd{.lr = 0.3}});
  for (int update = 0; update < 4; ++update) {
    for (int g = 0; g < micro_batches; ++g) {
      const double x = 0.1 * (1 + world.rank()) + 0.01 * update + 0.37 * g;
      const at::Tensor loss = (a.forward(torch::full({5}, x)).square().sum() +
                               b.forward(torch::full({3}, x)).square().sum());
      (scaled ? world.scale(loss) : loss).backward();
    }
    EXPECT_TRUE(world.step({.clip_norm = 0.5}).applied);
  }
  return world.parameter_hash();
}

// Powers of two round nothing.
TEST(LossScale, ChangesNoBit) {
  for (const int micro_batches : {1, 2, 4}) {
    on_ranks(patient(), [&](World& world) {
      const std::uint64_t plain = trained(world, false, micro_batches);
      EXPECT_EQ(trained(world, true, micro_batches), plain);
    });
  }
}

TEST(LossScale, KeepsTinyFp16GradientsAlive) {
  constexpr double kTiny = 0x1p-26;  // half of what rounds to fp16's smallest
  for (const bool scaled : {false, true}) {
    on_ranks(sums(), [&](World& world) {
      auto module = std::make_shared<Scale>(1, 0.0);
      module->to(torch::kHalf);
      Engine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 0x1p20}});
      const at::Tensor loss =
          net.forward(torch::ones({1}, torch::kHalf)).to(torch::kFloat).sum() * kTiny;
      (scaled ? world.scale(loss) : loss).backward();
      world.step();
      EXPECT_EQ(net->w.item<float>(), scaled ? -static_cast<float>(world.size()) * 0x1p-6F : 0.0F);
    });
  }
}

TEST(LossScale, UsedByOneRankAloneIsAnErrorEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        EXPECT_THROW(
            {
              const at::Tensor loss = gradient_of(net, 1.0);
              (world.rank() == 0 ? world.scale(loss) : loss).backward();
              world.step();
            },
            Mismatch);
        EXPECT_EQ(world.window(), 0);
        pass(world, net, 1.0);
        EXPECT_TRUE(world.step().applied);
      },
      2);
}

TEST(LossScale, RefusesFactorsThatRound) {
  const std::vector<LossScaling> bad = {
      {.initial = 1000.0},    {.initial = 0.0},        {.growth_factor = 3.0},
      {.growth_factor = 0.5}, {.backoff_factor = 0.3}, {.backoff_factor = 2.0},
      {.growth_interval = 0}, {.initial = kInfinity},  {.backoff_factor = std::nan("")}};
  for (const LossScaling& scaling : bad) {
    EXPECT_THROW(World::in_process(1, sums(scaling)), InvalidArgument);
  }
}

}  // namespace
}  // namespace tandem::testing
