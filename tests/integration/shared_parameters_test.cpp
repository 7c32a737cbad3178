// tests/integration/shared_parameters_test.cpp: engines whose parameters a node holds once: the
// same bits as with a copy for each rank, on one node and several, and what edits mean there.
#include "tests/support/scenarios.h"
#include "tests/support/thread_world.h"
#include "tests/support/trainer.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>

namespace tandem::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Scenario shared(Scenario scenario) {
  return with(std::move(scenario), &EngineOptions::share_parameters_on_node, true);
}

/// All ranks on one node, whatever else the tests are told.
WorldOptions one_node() {
  WorldOptions options = patient();
  options.ranks_per_node = 1000;
  return options;
}

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

ScaleEngine number(World& world, double value, at::ScalarType dtype = at::kFloat) {
  return {world,
          std::make_shared<Scale>(1, value, dtype),
          {.name = "net", .optimizer = Sgd{.lr = 1.0}, .share_parameters_on_node = true}};
}

TEST(SharedParameters, FollowTheOracles) {
  check(shared(two_engines_in_one_loss()));
  check(shared(in_bf16(chained(), {0, 1})));
  check(shared(tied_across_engines()));
}

TEST(SharedParameters, GiveTheBitsOfOneCopyForEachRank) {
  for (const Scenario& scenario :
       {three_engines_in_one_loss(), in_bf16(two_engines_in_one_loss(), {0}), siamese()}) {
    on_ranks(options_for(scenario), [&](World& world) {
      const std::uint64_t apart = trained_hash(world, scenario);
      EXPECT_EQ(trained_hash(world, shared(scenario)), apart);
    });
  }
}

TEST(SharedParameters, GiveTheSameBitsOnSeveralNodes) {
  const Scenario scenario = with_bucket_bytes(three_engines_in_one_loss(), 1000);
  for (const int size : {2, 3, 4}) {
    const std::uint64_t apart = trained_hash_on_threads(size, scenario, one_node());
    for (const int ranks_per_node : {1, 2, 3, 1000}) {
      WorldOptions options = one_node();
      options.ranks_per_node = ranks_per_node;
      options.queue_delay_us = 100;
      EXPECT_EQ(trained_hash_on_threads(size, shared(scenario), options), apart)
          << size << " ranks, " << ranks_per_node << " on a node";
    }
  }
}

TEST(SharedParameters, ANodeHoldsThemOnceAndAStepCopiesNone) {
  on_ranks(one_node(), [](World& world) {
    const auto bytes = [&](bool share) {
      Engine net(world, std::make_shared<Mlp>(64, 256, 64, 1),
                 {.name = "net", .share_parameters_on_node = share});
      const std::int64_t before = world.wire_report().gather_bytes;
      net.forward(torch::ones({4, 64})).sum().backward();
      EXPECT_TRUE(world.step().applied);
      const auto copied = static_cast<double>(world.wire_report().gather_bytes - before);
      const MemoryLine parameters = world.memory_report().lines[0];
      EXPECT_EQ(parameters.what, "parameters");
      EXPECT_EQ(parameters.bytes, parameters.expected);
      return std::pair{world.sum(static_cast<double>(parameters.bytes)), world.sum(copied)};
    };
    const auto [apart_bytes, apart_copied] = bytes(false);
    const auto [shared_bytes, shared_copied] = bytes(true);
    EXPECT_EQ(shared_bytes * world.size(), apart_bytes);
    EXPECT_EQ(shared_copied, 0.0);
    EXPECT_EQ(apart_copied > 0.0, world.size() > 1);
  });
}

// An edit that every rank makes is made once per rank: the hazard that the option's documentation
// names. One after another here, so that the product is exact; on one rank it is what was meant.
TEST(SharedParameters, AnEditInPlaceAppliesOncePerRank) {
  on_ranks(one_node(), [](World& world) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      auto net = number(world, 1.0, dtype);
      const at::NoGradGuard no_grad;
      for (int rank = 0; rank < world.size(); ++rank) {
        if (rank == world.rank()) {
          net.ptr()->w.mul_(0.5);
        }
        static_cast<void>(world.sum(0.0));
      }
      EXPECT_EQ(net.ptr()->w.item<double>(), std::ldexp(1.0, -world.size()));
      static_cast<void>(world.sum(0.0));
      if (world.rank() == world.size() - 1) {
        net.ptr()->w.fill_(3.0);
      }
      static_cast<void>(world.sum(0.0));
      EXPECT_EQ(net.ptr()->w.item<double>(), 3.0);
      // Training goes on from there: 3 - 1.
      const at::AutoGradMode gradients(true);
      net.forward(torch::ones({1}, dtype)).sum().backward();
      world.step();
      EXPECT_EQ(net.ptr()->w.item<double>(), 2.0);
    }
  });
}

TEST(SharedParameters, OtherMemoryIsRefusedOnAllRanks) {
  on_ranks(one_node(), [](World& world) {
    auto net = number(world, 1.0);
    const at::Tensor view = net.ptr()->w.detach();
    if (world.rank() == 0) {
      net.ptr()->w.set_data(torch::full({1}, 5.0F));
    }
    try {
      world.step();
      ADD_FAILURE() << "a parameter with other memory was stepped";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0"), HasSubstr("'w'"), HasSubstr("'net'"),
                                      HasSubstr("share_parameters_on_node")));
    }
    if (world.rank() == 0) {
      net.ptr()->w.set_data(view);
    }
    net.forward(torch::ones({1})).sum().backward();
    world.step();
    EXPECT_EQ(net.ptr()->w.item<double>(), 0.0);
  });
}

TEST(SharedParameters, WithoutBroadcastMustBeEqualBefore) {
  on_ranks(one_node(), [](World& world) {
    const auto make = [&](double value) {
      return ScaleEngine(world, std::make_shared<Scale>(3, value),
                         {.name = "net", .broadcast = false, .share_parameters_on_node = true});
    };
    if (world.size() > 1) {
      EXPECT_THROW(make(world.rank() == world.size() - 1 ? 2.0 : 1.0), Mismatch);
    }
    auto net = make(1.5);
    EXPECT_EQ(net.ptr()->w.sum().item<double>(), 4.5);
  });
}

/// A linear layer after BatchNorm.
class Normed : public Tower {
 public:
  Normed() : norm(register_module("norm", torch::nn::BatchNorm1d(8))) {}
  at::Tensor forward(const at::Tensor& input) override { return norm->forward(input); }
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(SharedParameters, BuffersStayEachRanksOwnAndFollowTheirPolicy) {
  on_ranks(one_node(), [](World& world) {
    auto module = std::make_shared<Normed>();
    Engine net(world, module, {.name = "net", .share_parameters_on_node = true});
    const at::Tensor input = torch::arange(32, torch::kFloat32).view({4, 8}) + world.rank();
    net.forward(input).square().sum().backward();
    world.step();
    // Rank 0's running mean, momentum 0.1: a tenth of the mean of columns 0..7 of its batch.
    EXPECT_NEAR(module->norm->running_mean[0].item<float>(), 0.1 * 12.0, 1e-5);
  });
}

TEST(SharedParameters, OutliveTheirEngine) {
  on_ranks(one_node(), [](World& world) {
    auto module = std::make_shared<Scale>(1, 1.0);
    {
      Engine net(world, module, {.name = "net", .share_parameters_on_node = true});
      static_cast<void>(net);
    }
    static_cast<void>(world.sum(0.0));
    EXPECT_EQ(module->w.item<double>(), 1.0);
  });
}

}  // namespace
}  // namespace tandem::testing
