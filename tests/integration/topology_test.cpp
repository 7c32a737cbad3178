// tests/integration/topology_test.cpp: who takes part in a loss and how often, held against the
// oracles. Every scenario here runs with default options, by plain loss.backward().
#include "tests/support/keyed.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <gtest/gtest.h>

namespace tandem::testing {
namespace {

TEST(Topology, OneEngine) { check(one_engine()); }

TEST(Topology, TwoEnginesInOneLoss) { check(two_engines_in_one_loss()); }

TEST(Topology, ThreeEnginesInOneLossOneOfThemNamedTensors) { check(three_engines_in_one_loss()); }

TEST(Topology, ChainedEngines) { check(chained()); }

TEST(Topology, ChainedEnginesWithSgdMomentumAndDecay) {
  check(with_sgd(chained(), 0.1, 0.9, 0.01));
}

TEST(Topology, OneEngineUsedTwiceInAForward) { check(siamese()); }

TEST(Topology, TwoLossesOnARetainedGraphAddUp) { check(two_losses()); }

// autograd::grad runs through the outputs' hooks without bringing a gradient: it is no micro-batch.
TEST(Topology, GradientPenaltyIsOneMicroBatch) {
  check(gradient_penalty());
  check(with_micro_batches(gradient_penalty(), 2));
}

TEST(Topology, TensorTiedAcrossTwoEngines) { check(tied_across_engines()); }

TEST(Topology, TensorTiedInsideOneEngine) {
  Scenario scenario = one_engine();
  scenario.nets = [] {
    const auto a = std::make_shared<Mlp>(8, 8, 8, 1);
    a->second = a->replace_module("second", a->first);
    return Nets{net_of(a)};
  };
  check(scenario);
}

// The second engine holds, under a name of its own, a tensor that the first one's module holds.
TEST(Topology, TensorTiedThroughNamedTensors) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.nets = [] {
    const auto a = mlp(1);
    NamedTensors shared = {{"shared", a->second->bias}, {"own", keyed({8}, 7).requires_grad_()}};
    return Nets{net_of(a), net_of(std::move(shared))};
  };
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor output = nets[0].forward(batch(place));
    return std::vector{
        (output * nets[1].parameter("own") - nets[1].parameter("shared")).square().mean()};
  };
  scenario.engines[1].optimizer = scenario.engines[0].optimizer;
  check(scenario);
}

TEST(Topology, ParameterThatNoLossReachesIsNeitherSteppedNorDecayed) {
  Scenario scenario = unused_parameter();
  scenario.steps = 3;
  check(scenario);
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    trainer.run();
    EXPECT_TRUE(trainer.nets()[0].parameter("unused").eq(1.0).all().item<bool>());
    EXPECT_EQ(trainer.engine(0).step_count("unused"), 0);
    EXPECT_EQ(trainer.engine(0).step_count("first.weight"), 3);
  });
}

// Rank 0 alone reaches the parameter: the others count as zeros, and it is stepped everywhere.
TEST(Topology, ParameterThatOneRankReachesIsStepped) {
  Scenario scenario = unused_parameter();
  scenario.losses = [plain = scenario.losses](const Nets& nets, const Place& place) {
    std::vector<at::Tensor> losses = plain(nets, place);
    if (place.rank == 0) {
      losses[0] = losses[0] + nets[0].parameter("unused").square().mean();
    }
    return losses;
  };
  check(scenario);
}

TEST(Topology, EngineThatNoRankUsedKeepsItsCountAndItsWeights) {
  Scenario scenario = engine_absent_everywhere();
  scenario.steps = 3;
  check(scenario);
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    trainer.step(0);
    const auto before = copies({trainer.nets()[0].parameter("first.weight")});
    const StepResult result = trainer.step(1);
    EXPECT_EQ(differing_bits(before, {trainer.nets()[0].parameter("first.weight")}), 0);
    EXPECT_EQ(trainer.engine(0).step_count("first.weight"), 1);
    EXPECT_EQ(trainer.engine(1).step_count("first.weight"), 2);
    ASSERT_EQ(result.engines.size(), 2U);
    EXPECT_EQ(result.engines[0].passes, 0);
    EXPECT_EQ(result.engines[0].denominator, 0.0);
    EXPECT_EQ(result.engines[1].passes, 1);
  });
}

TEST(Topology, EngineThatOneRankUsedCountsAsZerosElsewhere) {
  check(engine_absent_on_some_ranks());
}

TEST(Topology, RanksMayBuildTheSumInDifferentOrders) { check(reversed_on_odd_ranks()); }

TEST(Topology, BackwardThroughAnEngine) {
  Scenario scenario = chained();
  scenario.call = BackwardCall::kEngine;
  check(scenario);
}

TEST(Topology, BackwardThroughTheWorld) {
  Scenario scenario = with_micro_batches(chained(), 2);
  scenario.call = BackwardCall::kWorld;
  check(scenario);
}

/// Recomputes a tower in its backward, in a graph task of its own: checkpointing.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& input,
                            const Net* net) {
    context->save_for_backward({input});
    context->saved_data["net"] = reinterpret_cast<std::int64_t>(net);
    const at::NoGradGuard no_grad;
    return net->forward(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode enable(true);
    const auto* net = reinterpret_cast<const Net*>(context->saved_data["net"].toInt());
    const at::Tensor input = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({net->forward(input)}, {gradients[0]});
    return {input.grad(), at::Tensor()};
  }
};

TEST(Topology, CheckpointedEngine) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor hidden = Recomputed::apply(batch(place).requires_grad_(), &nets[0]);
    return std::vector{(nets[1].forward(hidden) - 1.0).square().mean()};
  };
  check(scenario);
}

// a's parameters arrive twice in one pass: in the outer graph task and in the nested one. The two
// are reduced apart, so that their sum is rounded elsewhere than autograd rounds it.
TEST(Topology, CheckpointedAndPlainUseInOnePass) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.losses = [](const Nets& nets, const Place& place) {
    const at::Tensor plain = nets[0].forward(batch(place, 1));
    const at::Tensor hidden = Recomputed::apply(batch(place).requires_grad_(), &nets[0]);
    return std::vector{(nets[1].forward(hidden) * plain - 1.0).square().mean()};
  };
  scenario.bitwise = false;
  check(scenario);
  check(with_micro_batches(scenario, 2));
}

}  // namespace
}  // namespace tandem::testing
