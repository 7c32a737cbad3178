// tests/integration/scopes_test.cpp: only() and hold(): which gradients of a pass count, and when
// they travel.
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

namespace tandem::testing {
namespace {

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
