// tests/integration/ownership_test.cpp: whose a parameter is: modules wrapped twice are refused;
// modules live on without their engines, engines without their users' modules.
#include "tests/support/number.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// --- who owns a parameter ---

TEST(Wrapping, AModuleTwiceInOneWorldIsRefused) {
  on_ranks(patient(), [](World& world) {
    const auto module = mlp(1);
    std::optional<Engine<std::shared_ptr<Mlp>>> first;
    first.emplace(world, module, EngineOptions{.name = "first"});
    EXPECT_THAT(refusal([&] { Engine second(world, module, {.name = "second"}); }),
                AllOf(HasSubstr("'first'"), HasSubstr("'second'"), HasSubstr("'first.weight'")));
    // Part of it is no better, and something of its own is enough.
    EXPECT_NE(refusal([&] { Engine second(world, module->first, {.name = "second"}); }), "");
    EXPECT_NO_THROW(Engine(
        world,
        NamedTensors{{"tied", module->first->weight}, {"own", torch::zeros({2}).requires_grad_()}},
        {.name = "second"}));
    first.reset();
    EXPECT_NO_THROW(Engine(world, module, {.name = "second"}));
  });
}

TEST(Wrapping, AModuleOfAnotherWorldIsRefusedWhileThatEngineLives) {
  on_ranks(patient(), [](World& world) {
    std::vector<World> others = World::in_process(1);
    const auto module = std::make_shared<Scale>(1, 0.0);
    std::optional<ScaleEngine> first;
    first.emplace(others[0], module, EngineOptions{.name = "first", .optimizer = Sgd{.lr = 1.0}});
    EXPECT_THAT(refusal([&] { Engine second(world, module, {.name = "second"}); }),
                AllOf(HasSubstr("'first'"), HasSubstr("'second'"), HasSubstr("another world")));
    sgd_step(others[0], *first, 1.0);
    first.reset();
    ScaleEngine second(world, module, {.name = "second", .optimizer = Sgd{.lr = 1.0}});
    sgd_step(world, second, 1.0);
    EXPECT_EQ(value_of(second), -2.0F);
  });
}

// --- lifetimes ---

TEST(Lifetimes, AModuleOutlivesEngineAndWorldAsPlainTorch) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto module = std::make_shared<Scale>(1, 0.0, dtype);
    const auto engine = [&](World& world) {
      return ScaleEngine(world, module, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    };
    {
      std::vector<World> worlds = World::in_process(1);
      ScaleEngine net = engine(worlds[0]);
      sgd_step(worlds[0], net, 1.0);
    }
    torch::optim::SGD plain(module->parameters(), torch::optim::SGDOptions(1.0));
    for (int pass = 0; pass < 2; ++pass) {
      module->forward(torch::full({1}, 2.0)).sum().backward();
    }
    EXPECT_EQ(module->w.grad().item<float>(), 4.0F) << ".grad accumulates again";
    plain.step();
    EXPECT_EQ(module->w.item<float>(), -5.0F);
    module->to(at::kDouble);
    module->to(dtype);
    std::vector<World> worlds = World::in_process(1);
    {
      ScaleEngine net = engine(worlds[0]);
      EXPECT_FALSE(module->w.grad().defined());
      sgd_step(worlds[0], net, 1.0);
    }
    ScaleEngine again = engine(worlds[0]);  // and once more in the same world
    sgd_step(worlds[0], again, 1.0);
    EXPECT_EQ(module->w.item<float>(), -7.0F);
  }
}

TEST(Lifetimes, AnEngineKeepsAModuleThatItsUserDropped) {
  on_ranks(patient(), [](World& world) {
    auto module = std::make_shared<Scale>(1, 0.0);
    ScaleEngine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    at::Tensor temperature = torch::zeros({1}).requires_grad_();
    Engine head(world, NamedTensors{{"t", temperature}},
                {.name = "head", .optimizer = Sgd{.lr = 1.0}});
    const at::Tensor loss = gradient_of(net, 1.0) + temperature.sum();
    module.reset();
    temperature.reset();
    loss.backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -1.0F);
    EXPECT_EQ(head.step_count("t"), 1);
  });
}

}  // namespace
}  // namespace tandem::testing
