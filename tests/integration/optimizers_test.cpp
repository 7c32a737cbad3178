// tests/integration/optimizers_test.cpp: every optimizer, parameter group, parameter type, wire
// type and kind of masters, against the oracles on 1 to 4 ranks, and with the same bits on all of
// them.
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace tandem::testing {
namespace {

struct Named {
  std::string name;
  Optimizer optimizer;
};

const std::vector<Named>& optimizers() {
  static const std::vector<Named> all = {
      {"AdamW, amsgrad", AdamW{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = true}},
      {"Adam", Adam{.lr = 1e-2}},
      {"Adam, decay, amsgrad", Adam{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = true}},
      {"Sgd, nesterov", Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}},
      {"Sgd, dampening", Sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5}},
      {"RmsProp", RmsProp{}},
      {"RmsProp, all",
       RmsProp{.lr = 1e-3, .weight_decay = 0.01, .momentum = 0.9, .centered = true}},
      {"Adagrad", Adagrad{}},
      {"Adagrad, all",
       Adagrad{.lr_decay = 0.1, .weight_decay = 0.01, .initial_accumulator_value = 0.1}},
      {"Lion", Lion{.lr = 1e-2, .weight_decay = 0.1}}};
  return all;
}

Scenario with_optimizer(Scenario scenario, const Optimizer& optimizer) {
  return with(std::move(scenario), &EngineOptions::optimizer, optimizer);
}

Scenario with_groups(Scenario scenario, const std::vector<ParameterGroup>& groups) {
  return with(std::move(scenario), &EngineOptions::groups, groups);
}

Scenario with_wire(Scenario scenario, Wire wire) {
  return with(std::move(scenario), &EngineOptions::wire, wire);
}

TEST(Optimizers, FollowTorchOptim) {
  for (const Named& one : optimizers()) {
    SCOPED_TRACE(one.name);
    check(with_optimizer(two_engines_in_one_loss(), one.optimizer));
  }
}

TEST(Optimizers, FollowTorchOptimOverMicroBatchesWithClipping) {
  for (const Named& one : optimizers()) {
    SCOPED_TRACE(one.name);
    Scenario scenario = with_micro_batches(with_optimizer(chained(), one.optimizer), 2);
    scenario.clip_norm = 0.5;
    scenario.steps = 5;
    check(scenario);
  }
}

TEST(Optimizers, FollowTorchOptimInBf16) {
  for (const Named& one : optimizers()) {
    SCOPED_TRACE(one.name);
    Scenario scenario =
        in_type(with_optimizer(two_engines_in_one_loss(), one.optimizer), at::kBFloat16, {0, 1});
    scenario.steps = 5;
    check(scenario);
  }
}

TEST(Optimizers, MayDifferBetweenEngines) {
  Scenario scenario = three_engines_in_one_loss();
  scenario.engines[0].optimizer = Lion{.lr = 1e-3};
  scenario.engines[1].optimizer = Sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true};
  scenario.engines[2].optimizer = Adagrad{};
  check(scenario);
  expect_same_bits(dealt(scenario));
}

TEST(Optimizers, GiveTheSameBitsOnAnyNumberOfRanks) {
  for (const Named& one : optimizers()) {
    SCOPED_TRACE(one.name);
    expect_same_bits(dealt(with_optimizer(two_engines_in_one_loss(), one.optimizer)));
  }
}

TEST(ParameterGroups, FollowTorchOptimWithSettingsOfTheirOwn) {
  Scenario scenario = with_groups(
      two_engines_in_one_loss(),
      {no_decay(is_vector()),
       {.name = "second", .where = name_matches("^second\\."), .lr = 3e-2, .beta1 = 0.8}});
  scenario.schedule = [](int step) { return 1.0 / (1.0 + step); };  // "second" keeps its rate
  check(scenario);
  expect_same_bits(dealt(scenario));
}

TEST(ParameterGroups, MixOptimizersWithAndWithoutMomentum) {
  Scenario scenario = with_groups(with_optimizer(chained(), Sgd{.lr = 0.1}),
                                  {{.where = name_matches("weight"), .momentum = 0.9}});
  scenario.steps = 5;
  check(scenario);
}

TEST(ParameterTypes, Fp16FollowsTorchOptim) {
  for (const Optimizer& optimizer :
       {Optimizer(AdamW{.lr = 1e-2}), Optimizer(Sgd{.lr = 0.1, .momentum = 0.9})}) {
    Scenario scenario = with_optimizer(two_engines_in_one_loss(), optimizer);
    scenario.steps = 5;
    check(in_type(scenario, at::kHalf, {0, 1}));
    check(in_type(scenario, at::kHalf, {1}));
    expect_same_bits(dealt(in_type(scenario, at::kHalf, {0, 1})));
  }
}

TEST(ParameterTypes, RemaindersGiveTheBitsOfSeparateMasters) {
  for (const Named& one : optimizers()) {
    SCOPED_TRACE(one.name);
    const Scenario scenario = dealt(
        in_type(with_optimizer(two_engines_in_one_loss(), one.optimizer), at::kBFloat16, {0, 1}));
    const std::uint64_t separate = trained_hash_on_threads(1, scenario, patient());
    on_ranks(options_for(scenario), [&](World& world) {
      EXPECT_EQ(trained_hash(world, with(scenario, &EngineOptions::masters, Masters::kRemainder)),
                separate);
    });
  }
}

TEST(WireTypes, RoundGradientsAndNothingElse) {
  for (const Wire wire : {Wire::kFloat32, Wire::kBFloat16, Wire::kFloat16}) {
    SCOPED_TRACE(static_cast<int>(wire));
    Scenario scenario = with_wire(two_engines_in_one_loss(), wire);
    scenario.one_graph = false;  // the whole batch's gradient is rounded nowhere
    scenario.steps = 5;
    check(scenario);
    expect_same_bits(dealt(scenario));
    check(with_wire(in_type(scenario, at::kBFloat16, {0, 1}), wire));
  }
}

/// Bytes that this rank has read from others for the reductions of one pass.
std::int64_t reduced_bytes(World& world, const Scenario& scenario) {
  Trainer trainer(world, scenario);
  const std::int64_t before = world.wire_report().reduce_bytes;
  trainer.step(0);
  return world.wire_report().reduce_bytes - before;
}

TEST(WireTypes, HalveTheWireOfFp32Engines) {
  on_ranks(patient(), [](World& world) {
    const Scenario scenario = two_engines_in_one_loss();
    const std::int64_t fp32 = reduced_bytes(world, scenario);
    EXPECT_EQ(reduced_bytes(world, with_wire(scenario, Wire::kBFloat16)) * 2, fp32);
    EXPECT_EQ(reduced_bytes(world, with_wire(scenario, Wire::kFloat16)) * 2, fp32);
    EXPECT_EQ(world.sum(static_cast<double>(fp32)) > 0.0, world.size() > 1);
  });
}

TEST(WireTypes, BeyondFp16TheStepIsSkipped) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 1.0),
               {.name = "net", .optimizer = Sgd{.lr = 1.0}, .wire = Wire::kFloat16});
    net.forward(torch::full({1}, 7e4)).sum().backward();  // fp16 ends at 65,504
    const StepResult result = world.step();
    EXPECT_EQ(result.reason, StepReason::kNonFinite);
    EXPECT_EQ(net.ptr()->w.item<float>(), 1.0F);
  });
}

// --- through the public API ---

TEST(ParameterGroups, AreSetByNameBetweenSteps) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1),
               {.name = "net",
                .optimizer = Sgd{.lr = 1.0},
                .groups = {{.name = "biases", .where = is_vector(), .weight_decay = 0.5}}});
    EXPECT_EQ(net.learning_rate("biases"), 1.0);
    net.set_learning_rate(0.5);
    EXPECT_EQ(net.learning_rate("biases"), 0.5);  // follows
    net.set_learning_rate(0.25, "biases");
    EXPECT_EQ(net.learning_rate(), 0.5);
    EXPECT_EQ(net.learning_rate("biases"), 0.25);
    EXPECT_EQ(net.weight_decay("biases"), 0.5);
    EXPECT_THROW(net.set_learning_rate(0.1, "bias"), InvalidArgument);
    EXPECT_THROW(static_cast<void>(net.weight_decay("bias")), InvalidArgument);
    // 0 everywhere: nothing moves.
    net.set_learning_rate(0.0);
    net.set_learning_rate(0.0, "biases");
    const std::uint64_t before = net.parameter_hash();
    net.forward(torch::ones({4, 8})).sum().backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(net.parameter_hash(), before);
  });
}

TEST(ParameterGroups, ThatDifferBetweenRanksAreRefused) {
  on_threads(2, patient(), [](World& world) {
    const std::string pattern = world.rank() == 0 ? "weight" : "bias";
    EXPECT_THROW(Engine(world, mlp(1),
                        {.groups = {{.name = "g", .where = name_matches(pattern), .lr = 1.0}}}),
                 Mismatch);
    Engine net(world, mlp(1),
               {.groups = {{.name = "g", .where = name_matches("weight"), .lr = 1.0}}});
    if (world.rank() == 1) {
      net.set_learning_rate(2.0, "g");
    }
    net.forward(torch::ones({4, 8})).sum().backward();
    EXPECT_THROW(world.step(), Mismatch);
  });
}

TEST(ParameterGroups, MistakesAreRefusedOnAllRanks) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THROW(Engine(world, mlp(1), {.groups = {no_decay(name_matches("no such"))}}),
                 InvalidArgument);
    EXPECT_THROW(Engine(world, mlp(1, at::kHalf), {.masters = Masters::kRemainder}),
                 InvalidArgument);
    EXPECT_THROW(Engine(world, mlp(1), {.groups = {no_decay([](const ParameterView&) -> bool {
                                          throw std::runtime_error("from the predicate");
                                        })}}),
                 InvalidArgument);
  });
}

// DeepSpeed 7982: two groups of 128 elements shared one Adam state. Each group's parameter must
// move as if it were alone: with gradients of one size, |first update| = lr of its group.
TEST(Cases, N16_GroupsKeepTheirOwnAdamStates) {
  on_ranks(patient(), [](World& world) {
    const at::Tensor a = torch::zeros({128}).requires_grad_();
    const at::Tensor b = torch::zeros({128}).requires_grad_();
    Engine pair(world, NamedTensors{{"a", a}, {"b", b}},
                {.name = "pair",
                 .optimizer = AdamW{.lr = 1.0, .eps = 0.0, .weight_decay = 0.0},
                 .groups = {{.name = "b", .where = name_matches("^b$"), .lr = 0.5}}});
    // Step 1 uses a alone, step 2 both: b's first update must be a first update.
    (3.0 * a).sum().backward();
    world.step();
    EXPECT_TRUE(torch::allclose(a, torch::full({128}, -1.0), 1e-6, 0.0));
    EXPECT_EQ(torch::count_nonzero(b).item<int64_t>(), 0);
    (3.0 * a - 7.0 * b).sum().backward();
    world.step();
    EXPECT_TRUE(torch::allclose(a, torch::full({128}, -2.0), 1e-6, 0.0));
    EXPECT_TRUE(torch::allclose(b, torch::full({128}, 0.5), 1e-6, 0.0));
    EXPECT_EQ(pair.step_count("a"), 2);
    EXPECT_EQ(pair.step_count("b"), 1);
  });
}

}  // namespace
}  // namespace tandem::testing
