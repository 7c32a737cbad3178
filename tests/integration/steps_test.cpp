// tests/integration/steps_test.cpp: the joint step: who steps, by which factor, and when nothing
// may change.
#include "tests/support/keyed.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

namespace tandem::testing {
namespace {

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

/// One number "w" under SGD with learning rate 1: after a step it has moved by minus its gradient.
ScaleEngine number(World& world, const char* name, double value = 0.0) {
  return {world, std::make_shared<Scale>(1, value), {.name = name, .optimizer = Sgd{.lr = 1.0}}};
}

at::Tensor gradient_of(ScaleEngine& engine, double gradient) {
  return engine.forward(torch::full({1}, gradient, torch::kFloat32)).sum();
}

float value_of(ScaleEngine& engine) { return engine->w.item<float>(); }

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

TEST(Only, DropsWhatArrivesElsewhere) {
  on_ranks(patient(), [](World& world) {
    auto generator = number(world, "generator", 2.0);
    auto critic = number(world, "critic", 3.0);
    const std::int64_t launches = world.wire_report().launches;
    {
      auto only = world.only({&generator});
      critic.forward(generator.forward(torch::ones({1}))).sum().backward();
    }
    const StepResult result = world.step();
    EXPECT_EQ(value_of(generator), 2.0F - 3.0F);
    EXPECT_EQ(value_of(critic), 3.0F);
    EXPECT_EQ(result.engines[1].passes, 0);
    EXPECT_EQ(world.wire_report().launches - launches, generator.buckets());
    EXPECT_FALSE(critic->w.grad().defined()) << "a dropped gradient is gone";
  });
}

TEST(Only, ScopesThatDifferBetweenRanksAreAnErrorEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        auto a = number(world, "a");
        auto b = number(world, "b");
        const auto pass = [&] { (gradient_of(a, 3.0) + gradient_of(b, 4.0)).backward(); };
        EXPECT_THROW(
            {
              {
                auto only = world.only({world.rank() == 0 ? static_cast<EngineBase*>(&a) : &b});
                pass();
              }
              world.step();
            },
            Error);
        EXPECT_EQ(world.window(), 0);
        pass();
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(a), -3.0F);
        EXPECT_EQ(value_of(b), -4.0F);
      },
      2);
}

/// The sum over ranks of the gradients of loss(rank), by plain autograd, divided by the ranks.
std::vector<at::Tensor> mean_gradients(const Net& net,
                                       int world_size,
                                       const std::function<at::Tensor(int rank)>& loss) {
  std::vector<at::Tensor> sums;
  for (const NamedTensor& parameter : net.parameters()) {
    sums.push_back(torch::zeros_like(parameter.tensor));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    loss(rank).backward();
    const NamedTensors parameters = net.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      sums[i] += parameters[i].tensor.grad();
    }
    for (const NamedTensor& parameter : parameters) {
      parameter.tensor.mutable_grad().reset();
    }
  }
  for (at::Tensor& sum : sums) {
    sum /= world_size;
  }
  return sums;
}

void descend(const Net& net, const std::vector<at::Tensor>& gradients, double lr) {
  const at::NoGradGuard no_grad;
  const NamedTensors parameters = net.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i].tensor;
    parameter -= lr * gradients[i];
  }
}

// The two alternating passes of a GAN, against a plain loop of one process.
TEST(Only, TrainsAGanLikeAPlainLoop) {
  constexpr double kRate = 0.2;
  on_ranks(patient(), [&](World& world) {
    Scenario scenario = with_sgd(two_engines_in_one_loss(), kRate);
    Trainer trainer(world, scenario);
    const Net& generator = trainer.nets()[0];
    const Net& critic = trainer.nets()[1];
    const Nets plain = scenario.nets();
    const auto critic_loss = [](const Net& g, const Net& c, const Place& place) {
      const at::Tensor fake = g.forward(batch(place, 0)).detach();
      return c.forward(fake).square().mean() + (c.forward(batch(place, 1)) - 1.0).square().mean();
    };
    const auto generator_loss = [](const Net& g, const Net& c, const Place& place) {
      return (c.forward(g.forward(batch(place, 2))) - 1.0).square().mean();
    };
    for (int step = 0; step < 8; ++step) {
      const Place mine{step, 0, world.rank(), world.size()};
      critic_loss(generator, critic, mine).backward();
      world.step({.engines = {&trainer.engine(1)}});
      {
        auto only = world.only({&trainer.engine(0)});
        generator_loss(generator, critic, mine).backward();
      }
      world.step({.engines = {&trainer.engine(0)}});

      const auto at = [&](int rank) { return Place{step, 0, rank, world.size()}; };
      descend(plain[1],
              mean_gradients(plain[1], world.size(),
                             [&](int rank) { return critic_loss(plain[0], plain[1], at(rank)); }),
              kRate);
      const auto gradients = mean_gradients(plain[0], world.size(), [&](int rank) {
        return generator_loss(plain[0], plain[1], at(rank));
      });
      for (const NamedTensor& parameter : plain[1].parameters()) {
        parameter.tensor.mutable_grad().reset();
      }
      descend(plain[0], gradients, kRate);
    }
    const auto expected = unique_parameters(plain);
    EXPECT_LE(distance(trainer.parameters(), expected, expected), 1e-6);
  });
}

TEST(Scopes, HoldAndOnlyNest) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, std::make_shared<Scale>(1, 0.0),
             {.name = "a", .optimizer = Sgd{.lr = 1.0}, .stage = 1});
    Engine b(world, std::make_shared<Scale>(1, 0.0),
             {.name = "b", .optimizer = Sgd{.lr = 1.0}, .stage = 1});
    const auto pass = [&] {
      (a.forward(torch::full({1}, 3.0F)) + b.forward(torch::full({1}, 4.0F))).sum().backward();
    };
    {
      auto hold = world.hold();
      auto only = world.only({&a});
      pass();
    }
    pass();
    world.step();
    EXPECT_EQ(a->w.item<float>(), -6.0F);
    EXPECT_EQ(b->w.item<float>(), -4.0F);
  });
}

}  // namespace
}  // namespace tandem::testing
