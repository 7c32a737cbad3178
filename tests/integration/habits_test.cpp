// tests/integration/habits_test.cpp: what users do that is not a plain training loop: gradients
// taken for looking, tokens counted around a failed pass, calls from inside a hook, frozen teachers
// with running statistics, ranks that leave early.
#include "tests/support/nodes.h"
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"
#include <tandem/tandem.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tandem::testing {
namespace {

struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown by the test") {}
};

/// The same; its backward runs `action`, which outlives it, when the pass is open: the engine's
/// output has been reached.
at::Tensor gradient_through(ScaleEngine& engine,
                            double gradient,
                            const std::function<void()>& action) {
  const at::Tensor input = torch::full({1}, gradient, torch::kFloat32).requires_grad_();
  return engine.forward(intercepted(input, action)).sum();
}

const std::function<void()> kThrow = [] { throw Thrown(); };

// A saliency map on one rank was matched with the others' training pass and changed every divisor.
TEST(Habits, GradientsTakenForLookingAreNoPass) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    if (world.rank() == 0) {
      const at::Tensor input = torch::ones({1}).requires_grad_();
      torch::autograd::grad({net.forward(input).sum()}, {input});
    }
    gradient_of(net, 2.0 * world.rank() + 1.0).backward();
    const StepResult result = world.step();
    EXPECT_EQ(result.denominator, world.size());
    EXPECT_EQ(result.engines[0].passes, 1);
    // Mean of 1, 3, 5, ... over R ranks is R.
    EXPECT_EQ(value_of(net), -static_cast<float>(world.size()));
  });
}

// Counted between the failed pass and its report, tokens survived or not, as the threads' timing
// had it.
TEST(Habits, TokensOfAFailedWindowAreCountedAgainByTheRetry) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  for (const bool count_first : {true, false}) {
    on_ranks(options, [&](World& world) {
      auto net = number(world, "net");
      bool failed = false;
      const auto pass = [&] {
        const bool fails = !failed && world.rank() + 1 == world.size();
        if (count_first) {
          world.count_tokens(10);
        }
        failed = failed || fails;
        (fails ? gradient_through(net, 10.0, kThrow) : gradient_of(net, 10.0)).backward();
        if (!count_first) {
          world.count_tokens(10);
        }
        return world.step();
      };
      std::optional<StepResult> result;
      for (int attempt = 0; attempt < 3 && !result; ++attempt) {
        try {
          result = pass();
        } catch (const Thrown&) {
        } catch (const BackwardFailed&) {
        }
      }
      ASSERT_TRUE(result.has_value());
      EXPECT_EQ(result->denominator, 10.0 * world.size());
      EXPECT_EQ(value_of(net), -1.0F);
    });
  }
}

TEST(Habits, CallsFromInsideABackwardAreRefusedAndThePassGoesOn) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    int refused = 0;
    const std::function<void()> action = [&] {
      const auto expect_refused = [&](const std::function<void()>& call) {
        try {
          call();
        } catch (const InvalidArgument&) {
          ++refused;
        }
      };
      expect_refused([&] { static_cast<void>(world.window()); });
      expect_refused([&] { world.step(); });
      expect_refused([&] { static_cast<void>(world.mean(1.0)); });
      expect_refused([&] { world.count_tokens(1); });
    };
    gradient_through(net, 1.0, action).backward();
    EXPECT_EQ(refused, 4);
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(value_of(net), -1.0F);
  });
}

// The report of a pass that failed elsewhere was lost with the exception of a backward() that never
// began.
TEST(Habits, ALossWithoutAGraphDoesNotSwallowAnEarlierFailure) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        if (world.rank() + 1 == world.size()) {
          EXPECT_THROW(gradient_through(net, 1.0, kThrow).backward(), Thrown);
        } else {
          gradient_of(net, 1.0).backward();
          EXPECT_ANY_THROW(world.backward(torch::ones({1})));
          EXPECT_THROW(world.step(), BackwardFailed);
        }
        gradient_of(net, 1.0).backward();
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(net), -1.0F);
      },
      2);
}

class Teacher : public Tower {
 public:
  Teacher() {
    norm = register_module("norm",
                           torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(2).affine(false)));
  }
  at::Tensor forward(const at::Tensor& input) override { return norm(input); }
  torch::nn::BatchNorm1d norm{nullptr};
};

// An engine whose parameters nobody saw kept different statistics on every rank.
TEST(Habits, BuffersOfAnEngineWithoutGradientsFollowThePolicyToo) {
  on_ranks(patient(), [](World& world) {
    Engine teacher(world, std::make_shared<Teacher>(), {.name = "teacher"});
    auto student = number(world, "student");
    const at::Tensor input = torch::arange(6, torch::kFloat32).reshape({3, 2}) + world.rank();
    const at::Tensor target = teacher.forward(input).detach();
    (gradient_of(student, 1.0) + target.sum()).backward();
    EXPECT_TRUE(world.step().applied);
    // Rank 0's batch: columns 0, 2, 4 and 1, 3, 5; momentum 0.1.
    EXPECT_TRUE(torch::allclose(teacher->norm->running_mean, torch::tensor({0.2F, 0.3F})));
  });
}

TEST(Habits, ABufferThatGrewIsRefused) {
  on_ranks(patient(), [](World& world) {
    const auto module = std::make_shared<Scale>(1, 0.0);
    at::Tensor bank = module->register_buffer("bank", torch::zeros({4}));
    Engine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    bank.resize_({2000});
    try {
      net.forward(torch::ones({1})).sum().backward();
      ADD_FAILURE() << "a grown buffer went unnoticed";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("bank"), std::string::npos);
    }
    bank.resize_({4});
    net.forward(torch::ones({1})).sum().backward();
    EXPECT_TRUE(world.step().applied);
  });
}

TEST(Habits, TwoTensorsOverOneMemoryAreRefused) {
  on_ranks(patient(), [](World& world) {
    const at::Tensor memory = torch::zeros({8});
    const NamedTensors tensors{{"whole", memory.detach().requires_grad_()},
                               {"half", memory.narrow(0, 4, 4).detach().requires_grad_()}};
    EXPECT_THROW(Engine(world, tensors), InvalidArgument);
    // Neighbours do not overlap.
    const NamedTensors halves{{"first", memory.narrow(0, 0, 4).detach().requires_grad_()},
                              {"second", memory.narrow(0, 4, 4).detach().requires_grad_()}};
    EXPECT_NO_THROW(Engine(world, halves));
  });
}

// One rank divided by ranks, the other by micro-batches: each its own slices, silently.
TEST(Habits, WorldsThatAverageDifferentlyAreRefused) {
  if (launched_ranks() < 2) {
    return;  // thread worlds are made with one set of options; the entries with more ranks test it
  }
  WorldOptions options = patient();
  on_ranks(options, [&](World& world) {
    options.average = world.rank() == 0 ? Average::kRanks : Average::kMicroBatches;
  });
  World world = World::from_environment(options);
  try {
    number(world, "net");
    ADD_FAILURE() << "ranks average differently, and nobody noticed";
  } catch (const Mismatch& error) {
    EXPECT_NE(std::string(error.what()).find("average by micro-batches"), std::string::npos)
        << error.what();
  }
}

// A rank in leave() steps along; what only the caller of step() can mend is not its affair.
TEST(Habits, ALeaverOutlivesAStepThatWasRefused) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(
      options,
      [](World& world) {
        auto net = number(world, "net");
        if (world.rank() == 1) {
          world.leave();
          return;
        }
        gradient_of(net, 6.0).backward();
        if (world.size() == 2) {
          EXPECT_THROW(world.step(), InvalidArgument) << "nobody counted tokens";
          world.count_tokens(3);
          EXPECT_TRUE(world.step().applied);
          EXPECT_EQ(value_of(net), -2.0F);
        } else {
          world.count_tokens(3);
          EXPECT_TRUE(world.step().applied);
          EXPECT_EQ(value_of(net), -2.0F);
        }
        world.leave();
      },
      2);
}

// Rank 0 has left: the others' statistics go on from the first rank that still steps.
TEST(Habits, BuffersFollowARankThatStillTrains) {
  on_ranks(
      patient(),
      [](World& world) {
        Engine teacher(world, std::make_shared<Teacher>(), {.name = "teacher"});
        auto student = number(world, "student");
        if (world.rank() == 0) {
          world.leave();
          return;
        }
        teacher.forward(torch::full({3, 2}, 10.0));
        gradient_of(student, 1.0).backward();
        EXPECT_TRUE(world.step().applied);
        EXPECT_TRUE(torch::allclose(teacher->norm->running_mean, torch::full({2}, 1.0)));
        world.leave();
      },
      2);
}

// Falling off the end (engines first, then the world) meets a rank that is in leave() with its
// engines.
TEST(Habits, EnginesMayGoBeforeTheLastLeave) {
  on_ranks(
      patient(),
      [](World& world) {
        std::optional<ScaleEngine> net;
        net.emplace(world, std::make_shared<Scale>(1, 0.0), EngineOptions{.name = "net"});
        gradient_of(*net, 1.0).backward();
        EXPECT_TRUE(world.step().applied);
        if (world.rank() == 0) {
          world.leave();
        } else {
          net.reset();
          world.close();
        }
      },
      2);
}

TEST(Habits, TimeoutsBeyondAYearAreRefused) {
  WorldOptions options;
  options.timeout = std::chrono::milliseconds::max();
  EXPECT_THROW(World::in_process(1, options), InvalidArgument);
}

}  // namespace
}  // namespace tandem::testing
