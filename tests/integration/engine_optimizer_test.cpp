// tests/integration/engine_optimizer_test.cpp: Engine::optimizer(): LibTorch's options, groups and
// schedulers over an engine; what it refuses.
#include "tests/support/keyed.h"
#include "tests/support/number.h"
#include "tests/support/thread_world.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::HasSubstr;

/// Two groups: weights with the engine's settings, biases with their own.
EngineOptions two_groups(Optimizer optimizer) {
  EngineOptions options;
  options.name = "net";
  options.optimizer = std::move(optimizer);
  options.groups = {{.name = "biases", .where = is_vector(), .lr = 0.25, .weight_decay = 0.0}};
  return options;
}

torch::optim::OptimizerOptions& options_of(EngineBase& engine, std::size_t group = 0) {
  return engine.optimizer().param_groups()[group].options();
}

template <class Options>
Options& options_as(EngineBase& engine, std::size_t group = 0) {
  return dynamic_cast<Options&>(options_of(engine, group));
}

TEST(EngineOptimizer, ShowsGroupsAndParametersThemselves) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1), two_groups(AdamW{.lr = 0.5, .beta1 = 0.8, .weight_decay = 0.125}));
    const std::int64_t rounds = world.wire_report().control_rounds;
    torch::optim::Optimizer& optimizer = net.optimizer();
    EXPECT_EQ(world.wire_report().control_rounds, rounds);
    EXPECT_EQ(&net.optimizer(), &optimizer);
    ASSERT_EQ(optimizer.param_groups().size(), 2U);
    const std::vector<at::Tensor>& weights = optimizer.param_groups()[0].params();
    const std::vector<at::Tensor>& biases = optimizer.param_groups()[1].params();
    ASSERT_EQ(weights.size(), 2U);
    ASSERT_EQ(biases.size(), 2U);
    EXPECT_TRUE(weights[0].is_same(net->first->weight));
    EXPECT_TRUE(weights[1].is_same(net->second->weight));
    EXPECT_TRUE(biases[0].is_same(net->first->bias));
    const auto& engine = options_as<torch::optim::AdamWOptions>(net);
    EXPECT_EQ(engine.lr(), 0.5);
    EXPECT_EQ(engine.weight_decay(), 0.125);
    EXPECT_EQ(engine.betas(), std::tuple(0.8, 0.999));
    EXPECT_EQ(options_of(net, 1).get_lr(), 0.25);
    EXPECT_EQ(options_as<torch::optim::AdamWOptions>(net, 1).weight_decay(), 0.0);
    EXPECT_TRUE(optimizer.state().empty());
  });
}

TEST(EngineOptimizer, HasEachOptimizersOwnOptions) {
  on_ranks(patient(), [](World& world) {
    const auto engine = [&](const Optimizer& settings) {
      return Engine(world, std::make_shared<Scale>(1, 0.0), {.optimizer = settings});
    };
    auto adam = engine(Adam{.eps = 0.5, .amsgrad = true});
    EXPECT_EQ(options_as<torch::optim::AdamOptions>(adam).eps(), 0.5);
    EXPECT_TRUE(options_as<torch::optim::AdamOptions>(adam).amsgrad());
    auto sgd = engine(Sgd{.momentum = 0.5, .nesterov = true});
    EXPECT_EQ(options_as<torch::optim::SGDOptions>(sgd).momentum(), 0.5);
    EXPECT_TRUE(options_as<torch::optim::SGDOptions>(sgd).nesterov());
    auto rmsprop = engine(RmsProp{.alpha = 0.5, .centered = true});
    EXPECT_EQ(options_as<torch::optim::RMSpropOptions>(rmsprop).alpha(), 0.5);
    EXPECT_TRUE(options_as<torch::optim::RMSpropOptions>(rmsprop).centered());
    auto adagrad = engine(Adagrad{.lr_decay = 0.5});
    EXPECT_EQ(options_as<torch::optim::AdagradOptions>(adagrad).lr_decay(), 0.5);
    auto lion = engine(Lion{.lr = 0.5, .beta2 = 0.75, .weight_decay = 0.25});
    EXPECT_EQ(options_as<LionOptions>(lion).get_lr(), 0.5);
    EXPECT_EQ(options_as<LionOptions>(lion).betas(), std::tuple(0.9, 0.75));
    EXPECT_EQ(options_as<LionOptions>(lion).weight_decay(), 0.25);
    for (EngineBase* each : {static_cast<EngineBase*>(&adam), static_cast<EngineBase*>(&sgd),
                             static_cast<EngineBase*>(&rmsprop), static_cast<EngineBase*>(&adagrad),
                             static_cast<EngineBase*>(&lion)}) {
      options_of(*each).set_lr(0.75);
      EXPECT_EQ(each->learning_rate(), 0.75);
    }
    EXPECT_EQ(world.step().reason, StepReason::kEmpty) << "none of it is refused";
  });
}

TEST(EngineOptimizer, LearningRateSetThereIsTheNextSteps) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");  // learning rate 1
    options_of(net).set_lr(0.5);
    gradient_of(net, 2.0).backward();
    world.step();
    EXPECT_EQ(value_of(net), -1.0F);
    EXPECT_EQ(net.learning_rate(), 0.5);
  });
}

TEST(EngineOptimizer, WeightDecaySetThereIsTheNextSteps) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net", 1.0);
    options_as<torch::optim::SGDOptions>(net).weight_decay(0.5);
    gradient_of(net, 2.0).backward();
    world.step();
    EXPECT_EQ(value_of(net), 1.0F - (2.0F + 0.5F));
    EXPECT_EQ(net.weight_decay(), 0.5);
  });
}

TEST(EngineOptimizer, WhatIsSetLaterStands) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    options_of(net).set_lr(0.5);
    net.set_learning_rate(0.25);
    EXPECT_EQ(options_of(net).get_lr(), 0.25);
    gradient_of(net, 4.0).backward();
    world.step();
    EXPECT_EQ(value_of(net), -1.0F);
    net.set_learning_rate(0.5);
    options_of(net).set_lr(2.0);
    net.set_weight_decay(0.0);  // another setting leaves it alone
    EXPECT_EQ(net.learning_rate(), 2.0);
    gradient_of(net, 1.0).backward();
    world.step();
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

TEST(EngineOptimizer, GroupsAreSetAlone) {
  on_ranks(patient(), [](World& world) {
    EngineOptions options = two_groups(Sgd{.lr = 0.5});
    options.groups[0].lr = std::nullopt;  // follows the engine
    Engine net(world, mlp(1), options);
    options_of(net).set_lr(0.125);
    EXPECT_EQ(net.learning_rate(), 0.125);
    EXPECT_EQ(net.learning_rate("biases"), 0.5);
    options_of(net, 1).set_lr(2.0);
    EXPECT_EQ(net.learning_rate("biases"), 2.0);
    EXPECT_FALSE(net.has_own_learning_rate("biases"));
    net.set_learning_rate(0.75);
    EXPECT_EQ(options_of(net, 0).get_lr(), 0.75);
    EXPECT_EQ(options_of(net, 1).get_lr(), 0.75);
  });
}

/// What the step throws on this rank, as text.
template <class Expected>
std::string step_error(World& world) {
  try {
    world.step();
  } catch (const Expected& error) {
    return error.what();
  }
  return "";
}

TEST(EngineOptimizer, RatesThatDifferBetweenRanksAreAnErrorEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        options_of(net).set_lr(world.rank() == 0 ? 0.5 : 0.25);
        gradient_of(net, 2.0).backward();
        EXPECT_THAT(step_error<Mismatch>(world), HasSubstr("learning rate 0.25"));
        options_of(net).set_lr(0.5);
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(net), -1.0F);
      },
      2);
}

/// `change` on the last rank alone is refused on all of them, until `back`.
void expect_refused(World& world,
                    EngineBase& net,
                    const std::string& words,
                    const std::function<void()>& change,
                    const std::function<void()>& back) {
  SCOPED_TRACE(words);
  const std::uint64_t before = world.parameter_hash();
  static_cast<void>(net.optimizer());
  const bool mine = world.rank() + 1 == world.size();
  if (mine) {
    change();
  }
  EXPECT_THAT(step_error<InvalidArgument>(world), HasSubstr(words));
  EXPECT_THAT(step_error<InvalidArgument>(world), HasSubstr(words)) << "as long as it stands";
  EXPECT_EQ(world.parameter_hash(), before);
  if (mine) {
    back();
  }
  EXPECT_NO_THROW(world.step());
}

TEST(EngineOptimizer, RefusesWhatItCannotChange) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1), two_groups(Sgd{.lr = 0.5, .momentum = 0.25}));
    auto& options = options_as<torch::optim::SGDOptions>(net, 1);
    expect_refused(
        world, net, "only learning rate and weight decay", [&] { options.momentum(0.5); },
        [&] { options.momentum(0.25); });
    expect_refused(
        world, net, "learning rate -1", [&] { options.set_lr(-1.0); },
        [&] { options.set_lr(0.25); });
    expect_refused(
        world, net, "learning rate nan",
        [&] { options.set_lr(std::numeric_limits<double>::quiet_NaN()); },
        [&] { options.set_lr(0.25); });
    torch::optim::Optimizer& optimizer = net.optimizer();
    expect_refused(
        world, net, "3 parameter groups, the engine 2",
        [&] { optimizer.add_param_group({{torch::zeros({1}).requires_grad_()}}); },
        [&] { optimizer.param_groups().pop_back(); });
    expect_refused(
        world, net, "its parameters are not the engine's",
        [&] { optimizer.param_groups()[0].params().push_back(torch::zeros({1}).requires_grad_()); },
        [&] { optimizer.param_groups()[0].params().pop_back(); });
    const torch::optim::SGDOptions kept = options;
    expect_refused(
        world, net, "its options were replaced",
        [&] {
          optimizer.param_groups()[1].set_options(
              std::make_unique<torch::optim::AdamOptions>(0.25));
        },
        [&] {
          optimizer.param_groups()[1].set_options(std::make_unique<torch::optim::SGDOptions>(kept));
        });
  });
}

TEST(EngineOptimizer, StepsThatEngineOnlyAndRunsItsClosure) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    torch::optim::Optimizer& optimizer = a.optimizer();
    EXPECT_FALSE(optimizer.step().defined());
    EXPECT_EQ(a.optimizer().last_result().reason, StepReason::kEmpty);
    gradient_of(b, 4.0).backward();
    const at::NoGradGuard no_grad;
    const at::Tensor loss = optimizer.step([&] {
      at::Tensor value = gradient_of(a, 3.0) + 2.0;
      value.backward();
      return value;
    });
    EXPECT_EQ(loss.item<float>(), 2.0F);
    EXPECT_EQ(value_of(a), -3.0F);
    EXPECT_EQ(value_of(b), 0.0F);
    EXPECT_TRUE(a.optimizer().last_result().applied);
    world.zero_grad();
  });
}

TEST(EngineOptimizer, ZeroGradClearsTheWindowAndTheBasesDoesNothing) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    gradient_of(net, 4.0).backward();
    net.optimizer().zero_grad();
    EXPECT_EQ(world.window(), 0);
    torch::optim::Optimizer& base = net.optimizer();
    for (int i = 0; i < 3; ++i) {  // the usual loop of code that knows nothing of Tandem
      base.zero_grad();
      gradient_of(net, 1.0).backward();
      base.step();
    }
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

TEST(EngineOptimizer, RefusesToSaveAndLoadStates) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    torch::optim::Optimizer& optimizer = net.optimizer();
    std::stringstream stream;
    EXPECT_THAT(refusal([&] { torch::save(optimizer, stream); }), HasSubstr("checkpoints"));
    torch::optim::SGD other({torch::zeros({1}).requires_grad_()}, torch::optim::SGDOptions(0.1));
    std::stringstream saved;
    torch::save(other, saved);
    EXPECT_THAT(refusal([&] { torch::load(optimizer, saved); }), HasSubstr("checkpoints"));
  });
}

TEST(EngineOptimizer, EndsWithItsEngine) {
  on_ranks(patient(), [](World& world) {
    auto other = number(world, "other");
    {
      auto net = number(world, "net");
      options_of(net).set_lr(-1.0);  // would be refused
    }
    sgd_step(world, other, 2.0);
  });
}

// LibTorch's StepLR of size 2 halves at its calls 3, 5, ...: it looks at the number of calls before
// this one, and not at 0.
TEST(EngineOptimizer, IsDrivenByStepLR) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    torch::optim::StepLR scheduler(net.optimizer(), 2, 0.5);
    const float moved[] = {1.0F, 1.0F, 1.0F, 0.5F, 0.5F, 0.25F};
    for (const float distance : moved) {
      const float before = value_of(net);
      gradient_of(net, 1.0).backward();
      world.step();
      EXPECT_EQ(value_of(net), before - distance);
      scheduler.step();
    }
  });
}

TEST(EngineOptimizer, IsDrivenByReduceLROnPlateau) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    using Plateau = torch::optim::ReduceLROnPlateauScheduler;
    Plateau scheduler(net.optimizer(), Plateau::min, /*factor=*/0.5F, /*patience=*/1);
    // Best at the first; worse at the second; worse again at the third, which is one too many.
    const double rates[] = {1.0, 1.0, 0.5};
    for (const double rate : rates) {
      scheduler.step(static_cast<float>(world.mean(7.0)));
      EXPECT_EQ(net.learning_rate(), rate);
    }
    gradient_of(net, 2.0).backward();
    world.step();
    EXPECT_EQ(value_of(net), -1.0F);
  });
}

}  // namespace
}  // namespace tandem::testing
