// tests/integration/engines_test.cpp: making engines: what is copied, compared and refused, and how
// they end.
#include "tests/support/keyed.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"
#include <tandem/tandem.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;

NamedTensors one_tensor(at::Tensor tensor) { return {{"x", std::move(tensor)}}; }

/// What making the engine threw, as text; empty if nothing.
template <class Expected>
std::string refusal(World& world, NamedTensors tensors, const EngineOptions& options) {
  try {
    Engine engine(world, std::move(tensors), options);
  } catch (const Expected& error) {
    return error.what();
  }
  return "";
}

TEST(Engines, CopyRankZerosParametersAndBuffers) {
  on_ranks(patient(), [](World& world) {
    const auto module = mlp(100 + world.rank());
    const at::Tensor buffer =
        module->register_buffer("buffer", torch::full({3}, double(world.rank())));
    Engine engine(world, module, {.name = "net"});
    const auto expected = unique_parameters({net_of(mlp(100))});
    EXPECT_EQ(differing_bits(unique_parameters({net_of(std::shared_ptr<Tower>(module))}), expected),
              0);
    EXPECT_TRUE(module->named_buffers()["buffer"].eq(0.0).all().item<bool>());
    EXPECT_EQ(world.sum(static_cast<double>(engine.parameter_hash() >> 40)),
              world.size() * static_cast<double>(engine.parameter_hash() >> 40));
  });
}

TEST(Engines, WithoutBroadcastEqualValuesPassAndDifferentOnesAreAMismatch) {
  on_ranks(
      patient(),
      [](World& world) {
        EXPECT_THROW(Engine(world, mlp(100 + world.rank()), {.broadcast = false}), Mismatch);
        EXPECT_NO_THROW(Engine(world, mlp(100), {.broadcast = false}));
      },
      2);
}

TEST(Engines, TakeHoldersPointersAndValues) {
  on_ranks(patient(), [](World& world) {
    Engine holder(world, torch::nn::Linear(4, 2), {.name = "holder"});
    Engine pointer(world, mlp(3), {.name = "pointer"});
    Engine value(world, Scale(4, 1.0), {.name = "value"});
    Engine sequential(world, torch::nn::Sequential(torch::nn::Linear(4, 2)),
                      {.name = "sequential"});
    static_assert(std::is_same_v<decltype(holder)::Impl, torch::nn::LinearImpl>);
    static_assert(std::is_same_v<decltype(pointer)::Impl, Mlp>);
    static_assert(std::is_same_v<decltype(value)::Impl, Scale>);
    EXPECT_EQ(holder.forward(torch::ones({1, 4})).sizes(), at::IntArrayRef({1, 2}));
    EXPECT_EQ(value.forward(torch::ones({4})).sum().item<float>(), 4.0F);
    EXPECT_EQ(pointer->first->weight.size(0), 16);
    EXPECT_EQ(&pointer.module(), pointer.ptr().get());
  });
}

TEST(Engines, AreNamedByDefault) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, mlp(1));
    Engine b(world, mlp(2));
    EXPECT_EQ(a.name(), "engine0");
    EXPECT_EQ(b.name(), "engine1");
  });
}

TEST(Engines, RefuseANameUsedTwice) {
  on_ranks(patient(), [](World& world) {
    Engine first(world, mlp(1), {.name = "net"});
    EXPECT_THAT(refusal<InvalidArgument>(world, one_tensor(torch::ones({2}).requires_grad_()),
                                         {.name = "net"}),
                HasSubstr("net"));
  });
}

TEST(Engines, ANameIsFreeAgainAfterItsEngine) {
  on_ranks(patient(), [](World& world) {
    for (int i = 0; i < 3; ++i) {
      Engine net(world, std::make_shared<Scale>(1, 0.0),
                 {.name = "net", .optimizer = Sgd{.lr = 1.0}});
      net.forward(torch::ones({1})).sum().backward();
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(net->w.item<float>(), -1.0F);
    }
  });
}

TEST(Engines, ModuleOutlivesItsEngine) {
  on_ranks(patient(), [](World& world) {
    const auto module = std::make_shared<Scale>(2, 3.0);
    { Engine net(world, module, {.name = "net"}); }
    module->forward(torch::ones({2})).sum().backward();
    // Plain LibTorch again: the gradient stays with the parameter.
    ASSERT_TRUE(module->w.grad().defined());
    EXPECT_TRUE(module->w.grad().eq(1.0).all().item<bool>());
    EXPECT_TRUE(module->w.eq(3.0).all().item<bool>());
  });
}

TEST(Engines, RefuseBadOptions) {
  on_ranks(patient(), [](World& world) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto refuse = [&](const EngineOptions& options) {
      return refusal<InvalidArgument>(world, one_tensor(torch::ones({2}).requires_grad_()),
                                      options);
    };
    EXPECT_NE(refuse({.bucket_bytes = 0}), "");
    EXPECT_NE(refuse({.bucket_bytes = -1}), "");
    EXPECT_NE(refuse({.stage = 0}), "");
    EXPECT_NE(refuse({.stage = 3}), "");
    EXPECT_THAT(refuse({.optimizer = AdamW{.lr = nan}}), HasSubstr("lr"));
    EXPECT_THAT(refuse({.optimizer = AdamW{.lr = -1.0}}), HasSubstr("lr"));
    EXPECT_THAT(refuse({.optimizer = AdamW{.beta1 = 1.0}}), HasSubstr("beta1"));
    EXPECT_THAT(refuse({.optimizer = AdamW{.beta2 = nan}}), HasSubstr("beta2"));
    EXPECT_THAT(refuse({.optimizer = AdamW{.eps = -1e-8}}), HasSubstr("eps"));
    EXPECT_THAT(refuse({.optimizer = AdamW{.weight_decay = nan}}), HasSubstr("weight_decay"));
    EXPECT_THAT(refuse({.optimizer = Sgd{.lr = nan}}), HasSubstr("lr"));
    EXPECT_THAT(refuse({.optimizer = Sgd{.momentum = -0.1}}), HasSubstr("momentum"));
    // The world is as before.
    EXPECT_EQ(refuse({.name = "fine"}), "");
  });
}

// One rank's fault is every rank's error.
TEST(Engines, RefuseOnAllRanksWhatOneRankGotWrong) {
  on_ranks(
      patient(),
      [](World& world) {
        const double lr = world.rank() == 0 ? std::numeric_limits<double>::quiet_NaN() : 1e-3;
        EXPECT_THROW(Engine(world, one_tensor(torch::ones({2}).requires_grad_()),
                            {.optimizer = AdamW{.lr = lr}}),
                     Error);
        EXPECT_EQ(world.sum(1.0), world.size());
      },
      2);
}

TEST(Engines, RefuseUnsupportedTypes) {
  on_ranks(patient(), [](World& world) {
    for (const auto dtype : {at::kDouble, at::kComplexFloat, at::kInt}) {
      EXPECT_THAT(
          refusal<InvalidArgument>(world, one_tensor(torch::ones({2}, dtype)), {.name = "net"}),
          HasSubstr("x"))
          << dtype;
    }
  });
}

TEST(Engines, LayoutsThatDifferNameTheFirstDifference) {
  on_ranks(
      patient(),
      [](World& world) {
        const std::int64_t columns = world.rank() == 0 ? 3 : 4;
        NamedTensors tensors = {{"same", torch::ones({2}).requires_grad_()},
                                {"other", torch::ones({2, columns}).requires_grad_()}};
        EXPECT_THAT(refusal<Mismatch>(world, tensors, {.name = "net"}), HasSubstr("other"));
        NamedTensors types = {
            {"weight",
             torch::ones({2}, world.rank() == 0 ? at::kFloat : at::kBFloat16).requires_grad_()}};
        EXPECT_THAT(refusal<Mismatch>(world, types, {.name = "net"}), HasSubstr("weight"));
        NamedTensors names = {
            {world.rank() == 0 ? "left" : "right", torch::ones({2}).requires_grad_()}};
        EXPECT_NE(refusal<Mismatch>(world, names, {.name = "net"}), "");
        EXPECT_THROW(Engine(world, mlp(1), {.name = world.rank() == 0 ? "p" : "q"}), Mismatch);
        // The world goes on.
        EXPECT_EQ(
            refusal<Error>(world, one_tensor(torch::ones({2}).requires_grad_()), {.name = "net"}),
            "");
      },
      2);
}

TEST(Engines, RefuseToBeUsedWithAnotherWorldsStep) {
  on_ranks(patient(), [](World& world) {
    Engine ours(world, std::make_shared<Scale>(1, 0.0));
    std::vector<World> others = World::in_process(1, patient());
    Engine theirs(others[0], std::make_shared<Scale>(1, 0.0));
    EXPECT_THROW(world.step({.engines = {&theirs}}), InvalidArgument);
    EXPECT_THROW(static_cast<void>(world.only({&theirs})), InvalidArgument);
  });
}

TEST(Engines, RefuseUnknownParameterNamesAndNegativeTokens) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 0.0));
    EXPECT_EQ(net.step_count("w"), 0);
    EXPECT_THROW(static_cast<void>(net.step_count("v")), InvalidArgument);
    EXPECT_THROW(net.count_tokens(-1), InvalidArgument);
    EXPECT_THROW(world.count_tokens(-1), InvalidArgument);
  });
}

// An engine may come while others are trained already.
TEST(Engines, JoinAWorldThatTrains) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, std::make_shared<Scale>(1, 0.0), {.name = "a", .optimizer = Sgd{.lr = 1.0}});
    a.forward(torch::ones({1})).sum().backward();
    world.step();
    Engine b(world, std::make_shared<Scale>(1, 0.0), {.name = "b", .optimizer = Sgd{.lr = 1.0}});
    b.forward(a.forward(torch::ones({1})) + 4.0).sum().backward();
    const StepResult result = world.step();
    EXPECT_EQ(result.updates, 2);
    // d/db = a + 4 = 3; d/da = b = 0.
    EXPECT_EQ(b->w.item<float>(), -3.0F);
    EXPECT_EQ(a->w.item<float>(), -1.0F);
  });
}

}  // namespace
}  // namespace tandem::testing
