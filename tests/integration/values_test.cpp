// tests/integration/values_test.cpp: small joint values, also while other ranks are already at
// their step, and ranks that leave.
#include "tests/support/models.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

namespace tandem::testing {
namespace {

TEST(Values, AreTheSameOnAllRanks) {
  on_ranks(patient(), [](World& world) {
    const double rank = world.rank();
    const double ranks = world.size();
    EXPECT_EQ(world.sum(rank + 1.0), ranks * (ranks + 1.0) / 2.0);
    EXPECT_EQ(world.mean(rank), (ranks - 1.0) / 2.0);
    EXPECT_FALSE(world.any(false));
    EXPECT_TRUE(world.any(world.rank() + 1 == world.size()));
    for (int root = 0; root < world.size(); ++root) {
      EXPECT_EQ(world.broadcast(10.0 + rank, root), 10.0 + root);
    }
  });
}

// (1e16 + 1) + -1e16 = 0 in double, (1e16 + -1e16) + 1 = 1: the order of the ranks shows.
TEST(Values, AreAddedInRankOrder) {
  on_exactly(3, patient(), [](World& world) {
    constexpr double kFirst[] = {1e16, 1.0, -1e16};
    constexpr double kSecond[] = {1e16, -1e16, 1.0};
    EXPECT_EQ(world.sum(kFirst[world.rank()]), 0.0);
    EXPECT_EQ(world.sum(kSecond[world.rank()]), 1.0);
  });
}

TEST(Values, AreJoinedByRanksAtTheirStep) {
  on_ranks(
      patient(),
      [](World& world) {
        Engine net(world, std::make_shared<Scale>(1, 0.0), {.optimizer = Sgd{.lr = 1.0}});
        net.forward(torch::full({1}, 3.0F)).sum().backward();
        if (world.rank() == 0) {
          EXPECT_EQ(world.mean(5.0), 5.0) << "over the ranks that called it";
          EXPECT_EQ(world.sum(7.0), 7.0);
          EXPECT_TRUE(world.any(true));
          EXPECT_EQ(world.broadcast(2.5, 0), 2.5);
        }
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(net->w.item<float>(), -3.0F);
      },
      2);
}

TEST(Values, OfDifferentKindsAreAMismatchEverywhere) {
  on_ranks(
      patient(),
      [](World& world) {
        EXPECT_THROW(world.rank() == 0 ? world.sum(1.0) : world.mean(1.0), Mismatch);
        EXPECT_EQ(world.sum(1.0), world.size());
      },
      2);
}

TEST(Values, BroadcastRefusesARootThatIsNotThere) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THROW(static_cast<void>(world.broadcast(1.0, world.size())), InvalidArgument);
    EXPECT_THROW(static_cast<void>(world.broadcast(1.0, -1)), InvalidArgument);
  });
}

// A rank that has left still owns shards: the others' steps move all parameters, everywhere.
TEST(Leave, LetsTheOthersGoOn) {
  on_ranks(
      patient(),
      [](World& world) {
        Engine net(world, std::make_shared<Scale>(4096, 0.0), {.optimizer = Sgd{.lr = 1.0}});
        const int passes = world.rank() == 0 ? 1 : 3;
        for (int i = 0; i < passes; ++i) {
          net.forward(torch::ones({4096})).sum().backward();
          EXPECT_TRUE(world.step().applied);
        }
        world.leave();
        // Each step's divisor counts the ranks that ran its pass: -1 a step.
        EXPECT_TRUE(net->w.eq(-3.0).all().item<bool>());
      },
      2);
}

TEST(Worlds, AreMadeOneAfterAnother) {
  for (int i = 0; i < 5; ++i) {
    on_ranks(patient(), [i](World& world) {
      Engine net(world, std::make_shared<Scale>(1, i),
                 {.name = "same", .optimizer = Sgd{.lr = 1.0}});
      net.forward(torch::ones({1})).sum().backward();
      world.step();
      EXPECT_EQ(net->w.item<float>(), static_cast<float>(i - 1));
      world.close();
      world.close();
    });
  }
}

TEST(Worlds, RefuseWorkAfterTheirEnd) {
  on_ranks(patient(), [](World& world) {
    world.close();
    EXPECT_THROW(world.step(), WorldBroken);
    EXPECT_THROW(static_cast<void>(world.sum(1.0)), WorldBroken);
  });
}

TEST(Worlds, RefuseBadOptions) {
  WorldOptions options = patient();
  options.timeout = std::chrono::milliseconds(0);
  EXPECT_THROW(World::in_process(2, options), InvalidArgument);
  EXPECT_THROW(World::from_environment(options), InvalidArgument);
  options = patient();
  options.queue_delay_us = -1;
  EXPECT_THROW(World::in_process(2, options), InvalidArgument);
  EXPECT_THROW(World::in_process(0, patient()), InvalidArgument);
}

}  // namespace
}  // namespace tandem::testing
