// tests/integration/failures_test.cpp: exceptions inside a backward. Every rank learns of them,
// nothing hangs, and a window that is repeated gives what a run without the failure gives.
#include "tests/support/nodes.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <thread>

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;

struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown on purpose") {}
};

/// chained(), with `action` between the engines in every backward: b's gradients have arrived, a's
/// have not.
Scenario interrupted(const std::function<void(const Place&)>& action) {
  Scenario scenario = chained();
  scenario.steps = 3;
  scenario.losses = [action](const Nets& nets, const Place& place) {
    // Kept alive by the graph's user: the loss is run at once.
    static thread_local std::function<void()> bound;
    bound = [action, place] { action(place); };
    const at::Tensor hidden = intercepted(nets[0].forward(batch(place)), bound);
    return std::vector{(nets[1].forward(hidden) - 1.0).square().mean()};
  };
  return scenario;
}

Scenario never_interrupted() {
  return interrupted([](const Place&) {});
}

struct Outcome {
  int own = 0;        // failures of this rank's backward
  int elsewhere = 0;  // reported by BackwardFailed
  std::uint64_t hash = 0;
};

/// Runs the scenario, repeating a window from its first pass whenever it failed somewhere.
Outcome train_with_retries(World& world, const Scenario& scenario) {
  Trainer trainer(world, scenario);
  Outcome outcome;
  for (int step = 0; step < scenario.steps;) {
    try {
      EXPECT_TRUE(trainer.step(step).applied);
      ++step;
    } catch (const BackwardFailed&) {
      ++outcome.elsewhere;
      EXPECT_EQ(world.window(), 0);
    } catch (const Thrown&) {
      ++outcome.own;
      EXPECT_EQ(world.window(), 0) << "b's gradients had arrived: the pass was open";
    }
  }
  outcome.hash = world.parameter_hash();
  return outcome;
}

TEST(Failures, RetriedWindowEqualsARunWithoutTheFailure) {
  for (const int passes : {1, 2}) {
    for (int failing_pass = 0; failing_pass < passes; ++failing_pass) {
      SCOPED_TRACE(std::to_string(failing_pass) + " of " + std::to_string(passes));
      on_ranks(patient(), [&](World& world) {
        std::uint64_t expected = 0;
        {
          Scenario clean = never_interrupted();
          clean.passes = [=](int, int, int) { return passes; };
          expected = trained_hash(world, clean);
        }
        bool thrown = false;
        Scenario scenario = interrupted([&](const Place& place) {
          const bool here =
              place.step == 1 && place.pass == failing_pass && place.rank + 1 == place.world_size;
          if (here && !thrown) {
            thrown = true;
            throw Thrown();
          }
        });
        scenario.passes = [=](int, int, int) { return passes; };
        const Outcome outcome = train_with_retries(world, scenario);
        const bool mine = world.rank() + 1 == world.size();
        EXPECT_EQ(outcome.own, mine ? 1 : 0);
        EXPECT_EQ(outcome.elsewhere, mine ? 0 : 1);
        EXPECT_EQ(outcome.hash, expected);
      });
    }
  }
}

// The same window again, with every moment and count as before: by another hash this would show.
TEST(Failures, OnAllRanksAtOnce) {
  on_ranks(patient(), [](World& world) {
    const std::uint64_t expected = trained_hash(world, never_interrupted());
    bool thrown = false;
    const Scenario scenario = interrupted([&](const Place& place) {
      if (place.step == 1 && !thrown) {
        thrown = true;
        throw Thrown();
      }
    });
    const Outcome outcome = train_with_retries(world, scenario);
    EXPECT_EQ(outcome.own, 1);
    EXPECT_EQ(outcome.elsewhere, 0) << "the own exception is the report";
    EXPECT_EQ(outcome.hash, expected);
  });
}

TEST(Failures, WorldBackwardTellsEveryRankAtOnce) {
  on_ranks(
      patient(),
      [](World& world) {
        Engine a(world, mlp(1), {.name = "a"});
        Engine b(world, mlp(2), {.name = "b"});
        const std::function<void()> action = [&] {
          if (world.rank() == 1) {
            throw Thrown();
          }
        };
        const auto loss = [&](bool fail) {
          const at::Tensor hidden = a.forward(batch({0, 0, world.rank(), world.size()}));
          return b.forward(fail ? intercepted(hidden, action) : hidden).square().mean();
        };
        if (world.rank() == 1) {
          EXPECT_THROW(world.backward(loss(true)), Thrown);
        } else {
          try {
            world.backward(loss(true));
            ADD_FAILURE() << "rank 1's failure was not reported";
          } catch (const BackwardFailed& failed) {
            EXPECT_THAT(failed.what(), HasSubstr("1"));
          }
        }
        EXPECT_EQ(world.window(), 0);
        world.backward(loss(false));
        EXPECT_EQ(world.window(), 1);
        EXPECT_TRUE(world.step().applied);
      },
      2);
}

// The loss itself throws: no hook has run, no pass was opened, the window stands and the pass is
// repeated.
TEST(Failures, ThrowBeforeTheFirstHookOpensNoPass) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 0.0),
               {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    const std::function<void()> action = [] { throw Thrown(); };
    const auto loss = [&] { return net.forward(torch::full({1}, 3.0F)).sum(); };
    loss().backward();
    if (world.rank() == 0) {
      EXPECT_THROW(intercepted(loss(), action).backward(), Thrown);
    }
    EXPECT_EQ(world.window(), 1);
    loss().backward();
    world.step();
    EXPECT_EQ(net->w.item<float>(), -6.0F);
  });
}

// Two threads of one rank cannot share a pass.
TEST(Failures, GraphTaskOfAnotherThreadInsideAPassIsRefused) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, std::make_shared<Scale>(1, 0.0), {.name = "a", .optimizer = Sgd{.lr = 1.0}});
    Engine b(world, std::make_shared<Scale>(1, 1.0), {.name = "b", .optimizer = Sgd{.lr = 1.0}});
    bool refused = false;
    const std::function<void()> action = [&] {
      std::thread([&] {
        try {
          a.forward(torch::full({1}, 100.0F)).sum().backward();
        } catch (const Error&) {
          refused = true;
        }
      }).join();
    };
    const at::Tensor hidden = intercepted(a.forward(torch::full({1}, 3.0F)), action);
    b.forward(hidden).sum().backward();
    EXPECT_TRUE(refused);
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(a->w.item<float>(), -3.0F) << "what the refused task brought must be gone";
  });
}

TEST(Failures, EngineDestroyedOnOneRankOnlyIsAMismatch) {
  on_ranks(
      patient(),
      [](World& world) {
        auto a = std::make_unique<Engine<std::shared_ptr<Scale>>>(
            world, std::make_shared<Scale>(1, 0.0), EngineOptions{.name = "a"});
        Engine b(world, std::make_shared<Scale>(1, 0.0), {.name = "b"});
        if (world.rank() == 0) {
          a.reset();
        }
        EXPECT_THROW(world.step(), Mismatch);
        a.reset();
        EXPECT_EQ(world.step().reason, StepReason::kEmpty);
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
