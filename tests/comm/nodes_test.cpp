#include "comm/nodes.h"

#include <tandem/error.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace tandem::comm {
namespace {

using testing::ElementsAre;

TEST(Nodes, RanksWithTheSameKeyShareANode) {
  const Nodes nodes({"b", "a", "b", "c", "a"});
  EXPECT_EQ(nodes.count(), 3);
  EXPECT_THAT(nodes.ranks_of(0), ElementsAre(0, 2));
  EXPECT_THAT(nodes.ranks_of(1), ElementsAre(1, 4));
  EXPECT_THAT(nodes.ranks_of(2), ElementsAre(3));
  EXPECT_EQ(nodes.node_of(4), 1);
  EXPECT_TRUE(nodes.together(0, 2));
  EXPECT_FALSE(nodes.together(0, 1));
}

TEST(Nodes, ConsecutiveRanksWithAnUnevenLastNode) {
  const Nodes nodes = Nodes::consecutive(5, 2);
  EXPECT_EQ(nodes.count(), 3);
  EXPECT_THAT(nodes.ranks_of(1), ElementsAre(2, 3));
  EXPECT_THAT(nodes.ranks_of(2), ElementsAre(4));
  EXPECT_EQ(Nodes::consecutive(5, 0).count(), 1);
  EXPECT_EQ(Nodes::consecutive(5, 9).count(), 1);
  EXPECT_THROW(Nodes::consecutive(5, -1), InvalidArgument);
}

TEST(Nodes, RelaysBelongToTheNodeAndShareTheWork) {
  const Nodes nodes = Nodes::consecutive(7, 3);
  for (int source = 0; source < 7; ++source) {
    for (int node = 0; node < 3; ++node) EXPECT_EQ(nodes.node_of(nodes.relay(source, node)), node);
  }
  // Three ranks serve three, the lone one is served by and serves all.
  EXPECT_EQ((std::set<int>{nodes.relay(0, 1), nodes.relay(1, 1), nodes.relay(2, 1)}),
            (std::set<int>{3, 4, 5}));
  EXPECT_EQ(nodes.relay(1, 2), 6);
}

}  // namespace
}  // namespace tandem::comm
