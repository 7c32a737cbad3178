// tests/integration/hooks_test.cpp: prologue and epilogue: once an engine and pass, around all its
// gradients.
#include "tests/support/models.h"
#include "tests/support/scenarios.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/autograd.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

using MlpEngine = Engine<std::shared_ptr<Mlp>>;

/// Counts, at each gradient of a leaf, how many prologues and epilogues its engine had before.
struct Observer {
  explicit Observer(MlpEngine& engine) {
    for (const at::Tensor& parameter : engine->parameters()) {
      parameter.register_hook([this, &engine](const at::Tensor& gradient) {
        prologues.push_back(engine.prologues());
        epilogues.push_back(engine.epilogues());
        return gradient;
      });
    }
  }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  std::vector<std::int64_t> prologues;
  std::vector<std::int64_t> epilogues;
};

at::Tensor loss_of(MlpEngine& a, MlpEngine& b, World& world, int step) {
  const Place place{step, 0, world.rank(), world.size()};
  return b.forward(a.forward(batch(place))).square().mean();
}

TEST(Hooks, RunOnceAroundAllGradients) {
  on_ranks(patient(), [](World& world) {
    MlpEngine a(world, mlp(1), {.name = "a"});
    MlpEngine b(world, mlp(2), {.name = "b"});
    Observer of_a(a);
    Observer of_b(b);
    for (std::int64_t pass = 1; pass <= 3; ++pass) {
      loss_of(a, b, world, 0).backward();
      for (const Observer* observer : {&of_a, &of_b}) {
        // Two weights and two biases: each saw this pass's prologue and not yet its epilogue.
        EXPECT_EQ(observer->prologues, std::vector<std::int64_t>(4, pass));
        EXPECT_EQ(observer->epilogues, std::vector<std::int64_t>(4, pass - 1));
      }
      for (const MlpEngine* engine : {&a, &b}) {
        EXPECT_EQ(engine->prologues(), pass);
        EXPECT_EQ(engine->epilogues(), pass);
      }
      of_a.prologues.clear();
      of_a.epilogues.clear();
      of_b.prologues.clear();
      of_b.epilogues.clear();
    }
    world.step();
  });
}

TEST(Hooks, CallsByHandAddNothing) {
  on_ranks(patient(), [](World& world) {
    MlpEngine a(world, mlp(1), {.name = "a"});
    MlpEngine b(world, mlp(2), {.name = "b"});
    a.backward_prologue();
    a.backward_prologue();
    b.backward_prologue();
    loss_of(a, b, world, 0).backward();
    a.backward_epilogue();
    a.backward_epilogue();
    EXPECT_EQ(a.prologues(), 1);
    EXPECT_EQ(a.epilogues(), 1);
    EXPECT_EQ(b.prologues(), 1);
    a.backward(loss_of(a, b, world, 1));
    EXPECT_EQ(a.prologues(), 2);
    EXPECT_EQ(a.epilogues(), 2);
    EXPECT_EQ(b.prologues(), 2);
    EXPECT_EQ(world.window(), 2);
    EXPECT_TRUE(world.step().applied);
  });
}

// Armed by hand, never reached: the pass of the other engine proceeds, and nothing of it is
// stepped.
TEST(Hooks, ArmingAnEngineThatNoPassReachesIsHarmless) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, std::make_shared<Scale>(1, 1.0), {.name = "a", .optimizer = Sgd{.lr = 1.0}});
    Engine b(world, std::make_shared<Scale>(1, 1.0), {.name = "b", .optimizer = Sgd{.lr = 1.0}});
    a.backward_prologue();
    b.forward(torch::ones({1})).sum().backward();
    const StepResult result = world.step();
    EXPECT_EQ(result.engines[0].passes, 0);
    EXPECT_EQ(a->w.item<float>(), 1.0F);
    EXPECT_EQ(b->w.item<float>(), 0.0F);
    EXPECT_EQ(a.epilogues(), 0);
  });
}

TEST(Hooks, AreNotCountedForAnEngineThatThePassMissed) {
  on_ranks(patient(), [](World& world) {
    MlpEngine a(world, mlp(1), {.name = "a"});
    MlpEngine b(world, mlp(2), {.name = "b"});
    a.forward(batch({0, 0, world.rank(), world.size()})).sum().backward();
    EXPECT_EQ(a.prologues(), 1);
    EXPECT_EQ(b.prologues(), 0);
    EXPECT_EQ(b.epilogues(), 0);
    world.step();
  });
}

TEST(Hooks, ForwardWithoutBackwardIsNoPass) {
  on_ranks(patient(), [](World& world) {
    MlpEngine a(world, mlp(1), {.name = "a"});
    for (int i = 0; i < 3; ++i) {
      a.forward(batch({i, 0, world.rank(), world.size()}));
    }
    EXPECT_EQ(a.prologues(), 0);
    EXPECT_EQ(world.window(), 0);
    EXPECT_EQ(world.step().reason, StepReason::kEmpty);
  });
}

// A hook that was on the leaf's slot before, and one set after, both go on working.
TEST(Hooks, LeaveTensorHooksOfOthersWorking) {
  on_ranks(patient(), [](World& world) {
    const auto module = std::make_shared<Scale>(1, 0.0);
    module->w.register_hook([](const at::Tensor& gradient) { return 2.0 * gradient; });
    Engine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    module->w.register_hook([](const at::Tensor& gradient) { return gradient + 1.0; });
    net.forward(torch::full({1}, 3.0F)).sum().backward();
    EXPECT_FALSE(module->w.grad().defined());
    world.step();
    EXPECT_EQ(module->w.item<float>(), -7.0F);
  });
}

}  // namespace
}  // namespace tandem::testing
