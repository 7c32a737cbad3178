// Cases: micro-batches counted twice, dropped or cleared, and results that depended on buckets and
// overlap.
#include "tests/support/keyed.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tandem::testing {
namespace {

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

ScaleEngine number(World& world, const char* name = "net") {
  return {world, std::make_shared<Scale>(1, 0.0), {.name = name, .optimizer = Sgd{.lr = 1.0}}};
}

void pass(ScaleEngine& net, double gradient) {
  net.forward(torch::full({1}, gradient, torch::kFloat32)).sum().backward();
}

// The micro-batch at the boundary of a window was reduced twice, or not at all. Every micro-batch
// brings a power of two of its own: 2 ranks of 4 passes sum to 1 + 2 + ... + 128 = 255, and any
// other multiset of them gives another number.
TEST(Cases, N8_EveryMicroBatchIsInTheSumOnce) {
  WorldOptions options = patient();
  options.average = Average::kNone;
  on_exactly(2, options, [](World& world) {
    auto net = number(world);
    for (int window = 1; window <= 3; ++window) {
      for (int i = 0; i < 4; ++i) {
        pass(net, std::ldexp(1.0, 2 * i + world.rank()));
      }
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(net->w.item<float>(), -255.0F * static_cast<float>(window));
    }
  });
}

// Buckets were laid anew after the first backward, and what the first micro-batch had left in them
// was gone. Here the order of the engines is settled by the first pass, against the order of
// registration.
TEST(Cases, N11_SettlingTheOrderDropsNothing) {
  Scenario scenario = with_micro_batches(with_bucket_bytes(chained(), 1), 2);
  scenario.steps = 1;
  check(scenario);
  scenario.nets = [] {
    return Nets{net_of(std::make_shared<Mlp>(8, 256, 8, 1)),
                net_of(std::make_shared<Mlp>(8, 256, 8, 2))};
  };
  check(scenario);
}

// A bias frozen every other step has seen half of the updates; with one count for all parameters
// its bias correction is another.
TEST(Cases, N14_ParametersCountTheirOwnSteps) {
  Scenario scenario = one_engine();
  scenario.steps = 10;
  scenario.one_graph = false;
  scenario.prepare = [](const Nets& nets, const Place& place) {
    nets[0].parameter("second.bias").set_requires_grad(place.step % 2 == 0);
  };
  check(scenario);
  on_ranks(options_for(scenario), [&](World& world) {
    Trainer trainer(world, scenario);
    trainer.run();
    EXPECT_EQ(trainer.engine(0).step_count("second.bias"), 5);
    EXPECT_EQ(trainer.engine(0).step_count("second.weight"), 10);
  });
}

// Results changed with the size of the reduce buckets.
TEST(Cases, N24_BucketSizeChangesNothing) {
  const Scenario scenario = with_micro_batches(three_engines_in_one_loss(), 2);
  on_ranks(options_for(scenario), [&](World& world) {
    const std::uint64_t hash = trained_hash(world, scenario);
    for (const std::int64_t bytes : {1, 64, 5000, 1 << 20}) {
      EXPECT_EQ(trained_hash(world, with_bucket_bytes(scenario, bytes)), hash) << bytes;
    }
  });
}

/// A tower called behind the engine's back: nothing is tracked, so nothing is known to come.
Scenario untracked(Scenario scenario) {
  scenario.losses = [plain = scenario.losses](const Nets& nets, const Place& place) {
    Nets direct = nets;
    for (Net& net : direct) {
      net.forward = net_of(net.tower).forward;
    }
    return plain(direct, place);
  };
  return scenario;
}

// With communication overlapped, results differed from those without.
TEST(Cases, N25_OverlapChangesNothing) {
  const Scenario scenario = with_micro_batches(with_bucket_bytes(chained(), 1), 2);
  std::uint64_t hash = 0;
  on_exactly(2, options_for(scenario), [&](World& world) {
    const std::uint64_t mine = trained_hash(world, scenario);
    EXPECT_EQ(trained_hash(world, untracked(scenario)), mine);
    if (world.rank() == 0) {
      hash = mine;
    }
  });
  WorldOptions delayed = options_for(scenario);
  delayed.queue_delay_us = 1000;
  on_exactly(2, delayed, [&](World& world) {
    const std::uint64_t mine = trained_hash(world, scenario);
    if (world.rank() == 0) {
      EXPECT_EQ(mine, hash);
    }
  });
}

// A step without any gradient crashed, or decayed the weights.
TEST(Cases, E14_StepWithoutGradients) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1), {.optimizer = AdamW{.lr = 0.1, .weight_decay = 0.5}});
    const std::uint64_t start = world.parameter_hash();
    EXPECT_EQ(world.step({.clip_norm = 1.0}).reason, StepReason::kEmpty);
    net.forward(batch({0, 0, world.rank(), world.size()}));
    EXPECT_EQ(world.step().reason, StepReason::kEmpty);
    EXPECT_EQ(world.parameter_hash(), start);
    EXPECT_EQ(net.step_count("first.weight"), 0);
  });
}

// The second backward of a retained graph replaced the first one's gradients; both count: 2 g. A
// zero_grad between the two leaves one.
TEST(Cases, E16_TwoBackwardsOfOneGraphAddUp) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world);
    const auto loss = [&] { return net.forward(torch::full({1}, 3.0F)).sum(); };
    at::Tensor twice = loss();
    twice.backward({}, /*retain_graph=*/true);
    twice.backward();
    world.step();
    EXPECT_EQ(net->w.item<float>(), -6.0F);

    twice = loss();
    twice.backward({}, /*retain_graph=*/true);
    world.zero_grad();
    twice.backward();
    world.step();
    EXPECT_EQ(net->w.item<float>(), -9.0F);
  });
  check(two_losses());
}

// A bare loss.backward(), with no call of an engine before it, was not noticed.
TEST(Cases, E17_BareBackward) {
  on_ranks(patient(), [](World& world) {
    const auto module = std::make_shared<Scale>(1, 0.0);
    Engine net(world, module, {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    module->forward(torch::full({1}, 3.0F)).sum().backward();
    EXPECT_TRUE(world.step().applied);
    EXPECT_EQ(module->w.item<float>(), -3.0F);
  });
}

// Batches of 4, 4, 8 and 4 samples on one rank and one batch fewer on another hung.
TEST(Cases, E19_UnevenBatchesAndRanks) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.steps = 3;
  scenario.passes = [](int, int rank, int world_size) {
    return world_size > 1 && rank + 1 == world_size ? 3 : 4;
  };
  scenario.losses = [](const Nets& nets, const Place& place) {
    const std::int64_t samples = place.pass == 2 ? 8 : 4;
    const at::Tensor input = keyed({samples, 8}, key_of({place.step, place.pass, place.rank}));
    return std::vector{nets[0].forward(input).square().mean() +
                       (nets[1].forward(input) - 1.0).square().mean()};
  };
  check(scenario);
}

// What padding holds (here: NaN, left behind by an earlier pass of a parameter beside it) reached
// the norm. 5 + 3 odd elements of one bucket; after a poisoned and skipped step each rank brings
// one parameter only, so that the other's old bytes and all padding are still in the staging
// memory.
TEST(Cases, S3_PoisonedPaddingReachesNeitherNormNorParameters) {
  on_ranks(patient(), [](World& world) {
    const at::Tensor left = torch::zeros({5}).requires_grad_();
    const at::Tensor right = torch::zeros({3}).requires_grad_();
    Engine net(world, NamedTensors{{"left", left}, {"right", right}},
               {.name = "net", .optimizer = Sgd{.lr = 1.0}});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (int i = 0; i < 3; ++i) {
      ((left * nan).sum() + (right * nan).sum()).backward();
      EXPECT_EQ(world.step().reason, StepReason::kNonFinite);
    }
    const bool first = world.rank() == 0;
    (first ? left.sum() : right.sum()).backward();
    const StepResult result = world.step();
    EXPECT_TRUE(result.applied);
    const double ranks = world.size();
    const double on_right = (ranks - 1.0) / ranks;
    EXPECT_NEAR(result.norm, std::sqrt(5.0 / (ranks * ranks) + 3.0 * on_right * on_right), 1e-6);
    EXPECT_TRUE(torch::allclose(left, torch::full({5}, -1.0 / ranks)));
    EXPECT_TRUE(torch::allclose(right, torch::full({3}, -on_right)));
    EXPECT_EQ(net.step_count("right"), world.size() > 1 ? 1 : 0);
  });
}

}  // namespace
}  // namespace tandem::testing
