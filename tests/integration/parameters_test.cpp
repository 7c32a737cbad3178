// tests/integration/parameters_test.cpp: what cannot go on is refused on all ranks alike:
// parameters of another type, gradients that went past the engine or were made by hand. And what
// freezing and thawing mean.
#include "tests/support/keyed.h"
#include "tests/support/number.h"
#include "tests/support/oracle.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// --- another type ---

TEST(Parameters, AnotherTypeOnOneRankIsRefusedByAllAtOnce) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    sgd_step(world, net, 1.0);
    const bool mine = world.rank() + 1 == world.size();
    const auto began = std::chrono::steady_clock::now();
    if (mine) {
      net->to(at::kDouble);
    }
    const std::string text = refusal([&] {
      gradient_of(net, 5.0).backward();  // throws where the parameter is
      EXPECT_FALSE(mine);
      world.step();  // and elsewhere at the next call
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank " + std::to_string(world.size() - 1)), HasSubstr("'w'"),
                            HasSubstr("'net'"), HasSubstr("fp32 [1]"), HasSubstr("Double [1]")));
    EXPECT_LT(std::chrono::steady_clock::now() - began, kPatience / 2);
    EXPECT_EQ(world.window(), 0);
    if (mine) {
      net->to(at::kFloat);
    }
    sgd_step(world, net, 2.0);
  });
}

TEST(Parameters, AnotherTypeIsRefusedByTheStepOfAllRanks) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    gradient_of(net, 5.0).backward();
    if (world.rank() == 0) {
      net->to(at::kBFloat16);
    }
    EXPECT_THAT(refusal([&] { world.step(); }),
                AllOf(HasSubstr("rank 0"), HasSubstr("'w'"), HasSubstr("'net'"),
                      HasSubstr("fp32 [1]"), HasSubstr("bf16 [1]")));
    EXPECT_EQ(world.window(), 0) << "discarded on all ranks";
    if (world.rank() == 0) {
      net->to(at::kFloat);
    }
    sgd_step(world, net, 2.0);
  });
}

TEST(Parameters, AnotherShapeOnAllRanksIsRefusedInsideBackward) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    net->w.set_data(torch::zeros({3}));
    EXPECT_THAT(refusal([&] { net.forward(torch::ones({3})).sum().backward(); }),
                AllOf(HasSubstr("fp32 [1]"), HasSubstr("fp32 [3]")));
    EXPECT_THAT(refusal([&] { world.backward(net.forward(torch::ones({3})).sum()); }),
                HasSubstr("fp32 [3]"));
    net->w.set_data(torch::full({1}, 4.0));
    sgd_step(world, net, 1.0);
    EXPECT_EQ(value_of(net), 3.0F);
  });
}

// Others may be anywhere: in a pass of several, at a value, or on their way out.
TEST(Parameters, ARefusalIsHeardByRanksAtOtherCallsAndNotByLeavers) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        if (world.rank() == 1) {
          world.leave();
          return;
        }
        if (world.rank() == 0) {
          net->to(at::kDouble);
          EXPECT_NE(refusal([&] { gradient_of(net, 1.0).backward(); }), "");
          EXPECT_NE(refusal([&] { world.step(); }), "");
          net->to(at::kFloat);
        } else {
          EXPECT_NE(refusal([&] { static_cast<void>(world.mean(1.0)); }), "");
          EXPECT_NE(refusal([&] { world.step(); }), "");
        }
        sgd_step(world, net, 2.0);
        world.leave();
      },
      2);
}

// Rank 0, out of data, steps while the others still run a pass.
TEST(Parameters, ARefusedStepMeetsAPassOfOthers) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        if (world.rank() == 0) {
          net->to(at::kDouble);
        } else {
          gradient_of(net, 1.0).backward();
        }
        EXPECT_THAT(refusal([&] { world.step(); }), HasSubstr("Double [1]"));
        EXPECT_EQ(world.window(), 0);
        if (world.rank() == 0) {
          net->to(at::kFloat);
        }
        sgd_step(world, net, 2.0);
      },
      2);
}

TEST(Parameters, ConvertingAModuleBeforeTheEndOfTheWorldIsFine) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    sgd_step(world, net, 1.0);
    net->to(at::kHalf);  // to be written to a file
    EXPECT_EQ(net->w.item<float>(), -1.0F);
  });
}

// target.copy_(online) with gradients on makes the parameter a result of the online net's.
TEST(Parameters, AnEditThatAutogradRecordedIsRefused) {
  on_ranks(patient(), [](World& world) {
    auto online = number(world, "online", 2.0);
    auto target = number(world, "target");
    target->w.requires_grad_(false);
    target->w.copy_(online->w);
    EXPECT_THAT(refusal([&] { gradient_of(online, 1.0).backward(); }),
                AllOf(HasSubstr("'w'"), HasSubstr("'target'"), HasSubstr("NoGradGuard")));
    target->w.detach_();
    sgd_step(world, online, 1.0);
    EXPECT_EQ(value_of(target), 2.0F);
  });
}

// --- hooks ---

struct Stranger : torch::autograd::PostAccumulateGradHook {
  explicit Stranger(std::vector<float>& found) : seen(found) {}
  void operator()(const at::Tensor& tensor) override {
    seen.push_back(tensor.grad().defined() ? tensor.grad().sum().item<float>() : -1.0F);
  }
  std::vector<float>& seen;
};

void put_stranger(const at::Tensor& tensor, std::vector<float>& seen) {
  torch::autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<Stranger>(seen));
}

// LibTorch's one slot goes to whoever writes last: the engine trained on without that parameter.
TEST(Hooks, AnotherHookOnTheSameTensorRunsBesideTandems) {
  on_ranks(patient(), [](World& world) {
    std::vector<float> seen;
    auto net = number(world, "net");
    sgd_step(world, net, 1.0);
    put_stranger(net->w, seen);
    sgd_step(world, net, 2.0);
    sgd_step(world, net, 3.0);
    EXPECT_EQ(seen, (std::vector<float>{2.0F, 3.0F})) << "each found .grad in place";
    EXPECT_FALSE(net->w.grad().defined());
  });
}

TEST(Hooks, AHookPutBetweenForwardAndBackwardCostsNothing) {
  on_ranks(patient(), [](World& world) {
    std::vector<float> seen;
    auto net = number(world, "net");
    const at::Tensor loss = gradient_of(net, 2.0);
    put_stranger(net->w, seen);
    loss.backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -2.0F);
    EXPECT_EQ(seen, std::vector<float>{2.0F});
  });
}

// Called past the engine, with no hook of Tandem's left: the pass cannot be known of until the
// step.
TEST(Hooks, AGradientThatWentPastTheEngineIsRefusedByAllRanks) {
  on_ranks(patient(), [](World& world) {
    std::vector<float> seen;
    auto net = number(world, "net");
    const bool mine = world.rank() == 0;
    if (mine) {
      put_stranger(net->w, seen);
    }
    const auto pass = [&] { (net->w * 2.0).sum().backward(); };
    pass();
    EXPECT_THAT(refusal([&] { world.step(); }),
                AllOf(HasSubstr("rank 0"), HasSubstr("'w'"), HasSubstr("'net'"),
                      HasSubstr("post-accumulate-grad hook"), HasSubstr("track()")));
    EXPECT_FALSE(net->w.grad().defined()) << "a retry would add to it";
    pass();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -2.0F);
    EXPECT_EQ(seen.size(), mine ? 2U : 0U);
  });
}

// --- gradients made by hand ---

TEST(Gradients, SetByHandAreRefusedByTheStepOfAllRanks) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    auto other = number(world, "other");
    gradient_of(other, 1.0).backward();
    if (world.rank() == 0) {
      net->w.mutable_grad() = torch::full({1}, 3.0);
    }
    EXPECT_TRUE(world.step({.engines = {&other}}).applied) << "no affair of that engine";
    EXPECT_THAT(refusal([&] { world.step(); }),
                AllOf(HasSubstr("rank 0"), HasSubstr("'w'"), HasSubstr("'net'"),
                      HasSubstr("torch::optim"), HasSubstr("(p * g).sum().backward()")));
    EXPECT_FALSE(net->w.grad().defined());
    (net->w * torch::full({1}, 3.0)).sum().backward();  // the way it names
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

// As LibTorch has it: backward() adds to what is in .grad.
TEST(Gradients, SetByHandBeforeAPassAreAddedToIt) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    net->w.mutable_grad() = torch::full({1}, 3.0);
    gradient_of(net, 1.0).backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -4.0F);
  });
}

TEST(Gradients, ZeroGradAndZerosAreHarmless) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(100.0).weight_decay(0.5));
    gradient_of(net, 1.0).backward();
    net->zero_grad();
    plain.zero_grad();
    plain.step();  // finds no gradients
    EXPECT_EQ(value_of(net), 0.0F);
    net->w.mutable_grad() = torch::zeros({1});  // allocated in advance, or zeroed and kept
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -1.0F);
    net->w.mutable_grad() = torch::full({1}, 3.0);
    world.zero_grad();
    EXPECT_FALSE(net->w.grad().defined());
    sgd_step(world, net, 2.0);
  });
}

TEST(Gradients, AProgramThatNeverStepsIsToldOnce) {
  on_exactly(1, patient(), [](World& world) {
    auto net = number(world, "net");
    torch::optim::SGD plain(net->parameters(), torch::optim::SGDOptions(1.0));
    ::testing::internal::CaptureStderr();
    const auto train = [&](int passes) {
      for (int pass = 0; pass < passes; ++pass) {
        world.backward(gradient_of(net, 1.0));
        plain.step();
      }
      return ::testing::internal::GetCapturedStderr();
    };
    EXPECT_EQ(train(999), "");
    ::testing::internal::CaptureStderr();
    EXPECT_THAT(train(2), AllOf(HasSubstr("World::step()"), HasSubstr("torch::optim")));
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(train(1000), "");
    EXPECT_EQ(value_of(net), 0.0F);
  });
}

// --- frozen and thawed ---

/// AdamW with decay over two parameters, one of them frozen now and then; torch::optim skips a
/// parameter without a gradient, and keeps its moments and its count.
void expect_freezing_like_torch(at::ScalarType dtype, int frozen_from, int frozen_until) {
  const auto freeze = [&](const at::Tensor& parameter, int step) {
    parameter.set_requires_grad(step < frozen_from || step >= frozen_until);
  };
  const auto loss = [](const at::Tensor& output, int step) {
    return (output.to(at::kFloat) * keyed({4, 8}, key_of({3, step}))).sum();
  };
  const auto input = [](int step) { return keyed({4, 8}, key_of({2, step})); };
  constexpr int kSteps = 8;
  const auto plain = mlp(1);  // the contract's oracle for bf16 is near enough for these few steps
  torch::optim::AdamW optimizer(plain->parameters(),
                                torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  const auto start = copies(plain->parameters());
  for (int step = 0; step < kSteps; ++step) {
    freeze(plain->first->weight, step);
    optimizer.zero_grad();
    loss(plain->forward(input(step)), step).backward();
    optimizer.step();
  }
  on_ranks(patient(), [&](World& world) {
    const auto net = mlp(1, dtype);
    Engine engine(world, net, {.name = "net", .optimizer = AdamW{.lr = 1e-2, .weight_decay = 0.1}});
    for (int step = 0; step < kSteps; ++step) {
      freeze(net->first->weight, step);
      const at::Tensor before = net->first->weight.detach().clone();
      loss(engine.forward(input(step)), step).backward();
      EXPECT_TRUE(world.step().applied);
      const bool frozen = step >= frozen_from && step < frozen_until;
      EXPECT_EQ(torch::equal(net->first->weight, before), frozen) << step;
    }
    EXPECT_EQ(engine.step_count("first.weight"), kSteps - (frozen_until - frozen_from));
    EXPECT_EQ(engine.step_count("second.weight"), kSteps);
    const auto expected = plain->parameters();
    EXPECT_LE(distance(net->parameters(), expected, difference(expected, start)),
              dtype == at::kFloat ? 1e-5 : 5e-2);
  });
}

TEST(Freezing, AThawedParameterGoesOnWithItsMomentsAndItsCount) {
  expect_freezing_like_torch(at::kFloat, 2, 5);
  expect_freezing_like_torch(at::kFloat, 0, 3);
  expect_freezing_like_torch(at::kBFloat16, 2, 5);
}

// What arrived before the freezing is the window's, as it is torch's: an optimizer steps what has a
// gradient. w: 0 - (3 + 0) * 1; the bias of one, thawed, gets both passes.
TEST(Freezing, BetweenThePassesOfAWindowKeepsWhatArrived) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    on_ranks(patient(), [&](World& world) {
      const NamedTensors tensors{{"frozen", torch::zeros({1}, dtype).requires_grad_()},
                                 {"free", torch::zeros({1}, dtype).requires_grad_()}};
      Engine net(world, tensors, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
      const auto pass = [&](double gradient) {
        ((tensors[0].tensor + tensors[1].tensor) * gradient).sum().backward();
      };
      pass(3.0);
      tensors[0].tensor.requires_grad_(false);
      pass(4.0);
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(tensors[0].tensor.item<float>(), -3.0F);
      EXPECT_EQ(tensors[1].tensor.item<float>(), -7.0F);
      pass(1.0);
      tensors[0].tensor.requires_grad_();
      pass(2.0);
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(tensors[0].tensor.item<float>(), -5.0F);
      EXPECT_EQ(tensors[1].tensor.item<float>(), -10.0F);
    });
  }
}

TEST(Freezing, OfAWholeEngineLeavesItAloneUntilItIsThawed) {
  on_ranks(patient(), [](World& world) {
    auto frozen = number(world, "frozen", 2.0);
    auto net = number(world, "net");
    frozen->w.requires_grad_(false);
    (gradient_of(net, 1.0) + gradient_of(frozen, 5.0)).backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(frozen), 2.0F);
    EXPECT_EQ(frozen.step_count("w"), 0);
    frozen->w.requires_grad_();
    (gradient_of(net, 1.0) + gradient_of(frozen, 5.0)).backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(frozen), -3.0F);
    EXPECT_EQ(value_of(net), -2.0F);
  });
}

}  // namespace
}  // namespace tandem::testing
