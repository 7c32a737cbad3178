// tests/integration/nodes_test.cpp: ranks on several nodes, forced on one machine: the same bits as
// on one node, whatever the delays of messages, and each slice crosses once.
//
// The other tests of this folder run on forced nodes as well (CMakeLists.txt).
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace tandem::testing {
namespace {

/// Twelve micro-batches a step on any number of ranks; parameters of many blocks, so that every
/// rank owns some.
Scenario dealt_scenario() {
  Scenario scenario = in_bf16(two_engines_in_one_loss(), {1});
  scenario.nets = [] {
    return Nets{net_of(std::make_shared<Mlp>(8, 257, 8, 1)),
                net_of(std::make_shared<Mlp>(8, 384, 8, 2, at::kBFloat16))};
  };
  scenario = dealt(std::move(scenario));
  scenario.steps = 3;
  return scenario;
}

TEST(Nodes, SameBitsHoweverRanksShareThem) {
  const Scenario scenario = dealt_scenario();
  const std::uint64_t expected = trained_hash_on_threads(1, scenario, patient());
  for (const int ranks_per_node : {0, 1, 2}) {
    SCOPED_TRACE(std::to_string(ranks_per_node) + " ranks a node");
    WorldOptions options = options_for(scenario);
    options.ranks_per_node = ranks_per_node;
    on_ranks(
        options, [&](World& world) { EXPECT_EQ(trained_hash(world, scenario), expected); }, 2);
    if (launched_ranks() == 1) {
      EXPECT_EQ(trained_hash_on_threads(4, scenario, options), expected);
    }
  }
}

TEST(Nodes, SameBitsUnderRandomDelays) {
  const Scenario scenario = dealt_scenario();
  const std::uint64_t expected = trained_hash_on_threads(1, scenario, patient());
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    WorldOptions options = options_for(scenario);
    options.ranks_per_node = 1 + static_cast<int>(seed % 2);
    options.queue_delay_us = 2000;
    options.queue_delay_seed = seed;
    on_ranks(
        options, [&](World& world) { EXPECT_EQ(trained_hash(world, scenario), expected) << seed; },
        3);
  }
}

// P bytes of parameters, N nodes: a node receives once what the others own, P minus its own slices
// a step; a rank receives its slice from each rank of another node a pass.
TEST(Nodes, EachSliceCrossesOnceANode) {
  WorldOptions options = patient();
  options.ranks_per_node = 2;
  on_ranks(
      options,
      [](World& world) {
        constexpr std::int64_t kBlock = 1024;
        constexpr std::int64_t kBlocks = 12;  // dealt evenly to 2, 3 and 4 ranks
        const int nodes = (world.size() + 1) / 2;
        Engine net(world, std::make_shared<Scale>(kBlock * kBlocks, 1.0), {.name = "net"});
        const WireReport before = world.wire_report();
        net.forward(at::ones({kBlock * kBlocks})).sum().backward();
        world.step();
        const WireReport after = world.wire_report();
        const std::int64_t bytes = kBlock * kBlocks * 4;
        const double crossed =
            world.sum(static_cast<double>(after.between_nodes_bytes - before.between_nodes_bytes));
        // Reduction: every slice from all ranks of other nodes. Gather: every slice to N - 1 nodes.
        double expected = static_cast<double>(bytes) * (nodes - 1);
        for (int rank = 0; rank < world.size(); ++rank) {
          const int near = std::min(2, world.size() - rank / 2 * 2);
          expected += static_cast<double>(bytes) / world.size() * (world.size() - near);
        }
        EXPECT_EQ(crossed, expected);
        EXPECT_NE(after.to_string().find("between nodes"), std::string::npos);
      },
      2);
}

TEST(Nodes, FewerThanNoRanksANodeIsRefused) {
  WorldOptions options = patient();
  options.ranks_per_node = -1;
  EXPECT_THROW(World::in_process(2, options), InvalidArgument);
  EXPECT_THROW(World::from_environment(options), InvalidArgument);
}

}  // namespace
}  // namespace tandem::testing
