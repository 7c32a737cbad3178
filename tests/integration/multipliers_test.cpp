// tests/integration/multipliers_test.cpp: multiply_gradients(): what it multiplies, who sees it,
// what forgets it, and what is refused. Sums of windows are compared in random_windows_test.cpp.
#include "tests/support/number.h"
#include "tests/support/thread_world.h"

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;

WorldOptions sums() {
  WorldOptions options = patient();
  options.average = Average::kNone;
  return options;
}

/// On the first rank alone, so that sums do not depend on the number of ranks; zeros on the others.
void pass(World& world, ScaleEngine& net, double gradient) {
  gradient_of(net, world.rank() == 0 ? gradient : 0.0).backward();
}

TEST(Multipliers, LaterPassesAreNotMultiplied) {
  for (const int stage : {1, 2}) {
    for (const bool hold : {false, true}) {
      on_ranks(sums(), [&](World& world) {
        ScaleEngine net(world, std::make_shared<Scale>(1, 0.0),
                        {.name = "net", .optimizer = Sgd{.lr = 1.0}, .stage = stage});
        {
          const std::optional<Scope> scope =
              hold ? std::optional<Scope>(world.hold()) : std::optional<Scope>();
          pass(world, net, 3.0);
          net.multiply_gradients(0.5);
          pass(world, net, 5.0);
        }
        world.multiply_gradients(2.0);
        world.multiply_gradients(0.25);
        pass(world, net, 7.0);
        const StepResult result = world.step();
        EXPECT_EQ(value_of(net), -((3.0 * 0.5 + 5.0) * 0.5 + 7.0));
        EXPECT_EQ(result.engines.at(0).multiplier, 1.0);  // nothing since the last pass
      });
    }
  }
}

TEST(Multipliers, AreForOneEngineOrForAll) {
  on_ranks(sums(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    const double gradient = world.rank() == 0 ? 8.0 : 0.0;
    (gradient_of(a, gradient) + gradient_of(b, gradient)).backward();
    a.multiply_gradients(0.5);
    world.multiply_gradients(0.5);
    const StepResult result = world.step();
    EXPECT_EQ(value_of(a), -2.0F);
    EXPECT_EQ(value_of(b), -4.0F);
    EXPECT_EQ(result.engines.at(0).multiplier, 0.25);
    EXPECT_EQ(result.engines.at(1).multiplier, 0.5);
  });
}

TEST(Multipliers, AreSeenByNormsClippingAndGradient) {
  on_ranks(sums(), [](World& world) {
    auto net = number(world, "net");
    pass(world, net, 6.0);
    world.multiply_gradients(-0.5);
    EXPECT_EQ(net.gradient("w").item<float>(), -3.0F);
    const StepResult result = world.step({.clip_norm = 1.5});
    EXPECT_EQ(result.norm, 3.0);
    EXPECT_EQ(result.engines.at(0).norm, 3.0);
    EXPECT_NEAR(result.clip_factor, 0.5, 1e-6);
    EXPECT_NEAR(value_of(net), 1.5, 1e-5);
  });
}

TEST(Multipliers, ZeroLeavesZeroGradientsAndParametersDecay) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 1.0),
               {.name = "net", .optimizer = AdamW{.lr = 0.1, .weight_decay = 0.5}});
    const at::Tensor w = torch::ones({1}).requires_grad_();
    torch::optim::AdamW oracle({w}, torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    for (const double factor : {1.0, 0.0, 1.0}) {
      net.forward(torch::ones({1})).sum().backward();
      world.multiply_gradients(factor);
      EXPECT_TRUE(world.step().applied);
      w.mutable_grad() = torch::full({1}, factor);
      oracle.step();
      EXPECT_NEAR(net->w.item<double>(), w.item<double>(), 1e-6) << factor;
    }
    EXPECT_EQ(net.step_count("w"), 3);
  });
}

TEST(Multipliers, GoWithTheWindow) {
  on_ranks(sums(), [](World& world) {
    auto net = number(world, "net");
    world.multiply_gradients(0.5);  // of nothing
    pass(world, net, 1.0);
    world.zero_grad();
    pass(world, net, 1.0);
    world.multiply_gradients(0.5);
    world.zero_grad();
    pass(world, net, 1.0);
    world.step();
    EXPECT_EQ(value_of(net), -1.0F);
    pass(world, net, 1.0);
    world.step();
    EXPECT_EQ(value_of(net), -2.0F);
  });
}

TEST(Multipliers, OnlyFiniteOnesAreTaken) {
  on_ranks(sums(), [](World& world) {
    auto net = number(world, "net");
    pass(world, net, 1.0);
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      EXPECT_THAT(refusal([&] { world.multiply_gradients(bad); }), HasSubstr("is finite"));
      EXPECT_THAT(refusal([&] { net.multiply_gradients(-bad); }), HasSubstr("is finite"));
    }
    world.step();
    EXPECT_EQ(value_of(net), -1.0F);
  });
}

/// What the Mismatch of `call` says; empty if there is none.
std::string mismatch(const std::function<void()>& call) {
  try {
    call();
  } catch (const Mismatch& error) {
    return error.what();
  }
  return "";
}

TEST(Multipliers, ThatDifferAtAStepAreAnErrorEverywhereAndGradientsAreKept) {
  on_ranks(
      sums(),
      [](World& world) {
        auto net = number(world, "net");
        pass(world, net, 4.0);
        world.multiply_gradients(world.rank() == 1 ? 0.5 : 0.25);
        const std::string said = mismatch([&] { world.step(); });
        EXPECT_THAT(said, HasSubstr("multiply_gradients"));
        EXPECT_THAT(said, HasSubstr("'net'"));
        EXPECT_THAT(said, HasSubstr("0.5"));
        EXPECT_THAT(said, HasSubstr("0.25"));
        world.multiply_gradients(world.rank() == 1 ? 0.5 : 1.0);
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(net), -1.0F);
      },
      2);
}

TEST(Multipliers, ThatDifferAtAPassDiscardWindowsEverywhere) {
  on_ranks(
      sums(),
      [](World& world) {
        auto net = number(world, "net");
        pass(world, net, 4.0);
        world.multiply_gradients(world.rank() == 1 ? 0.5 : 0.25);
        EXPECT_THAT(mismatch([&] {
                      pass(world, net, 4.0);
                      world.step();
                    }),
                    HasSubstr("multiply_gradients"));
        EXPECT_EQ(world.window(), 0);
        pass(world, net, 4.0);
        world.step();
        EXPECT_EQ(value_of(net), -4.0F);
      },
      2);
}

// A rank that is out of data makes all calls but the passes.
TEST(Multipliers, RanksThatOnlyJoinMultiplyOnce) {
  on_ranks(
      sums(),
      [](World& world) {
        auto net = number(world, "net");
        const bool out_of_data = world.rank() + 1 == world.size();
        pass(world, net, 4.0);
        for (const double factor : {0.5, 0.0, 3.0}) {
          world.multiply_gradients(factor);
          world.multiply_gradients(2.0);
          if (!out_of_data) {
            pass(world, net, 4.0);
          }
        }
        world.multiply_gradients(0.5);
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(net), -(4.0F * 6.0F + 4.0F) * 0.5F);
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
