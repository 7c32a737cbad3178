// Ranks as threads of one process, for the tests of comm.
#pragma once

#include "comm/rendezvous.h"
#include "comm/store_rendezvous.h"
#include "tests/comm/fake_store.h"

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tandem::comm {

/// Long enough for a loaded machine; no test that passes waits for it.
inline Deadline patient() { return Deadline::after(std::chrono::seconds(60)); }
inline Deadline soon() { return Deadline::after(std::chrono::milliseconds(150)); }

/// How the ranks of a test find each other, and which of them share a node.
struct RankShape {
  ThreadNodes nodes = {};  // delays: of messages, or of the store's answers
  bool over_store = false;
  std::size_t chunk_bytes = kStoreChunkBytes;
};

/// The rank's side of `shape` over `store`; collective.
inline std::unique_ptr<Rendezvous> join_over(std::shared_ptr<Store> store,
                                             Group group,
                                             const RankShape& shape = {.over_store = true}) {
  const auto rank = static_cast<std::size_t>(group.rank);
  return make_store_rendezvous(
      std::move(store),
      StoreRanks{group, shape.nodes.ranks_per_node,
                 shape.nodes.keys.empty() ? std::string() : shape.nodes.keys[rank],
                 shape.chunk_bytes},
      patient());
}

/// Runs `body` once a rank, each in its own thread; what escapes fails the test with its rank.
inline void on_threads(int size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << "on rank " << rank << " of " << size;
  }
}

inline void on_thread_ranks(int size,
                            const std::function<void(Rendezvous&)>& body,
                            const RankShape& shape) {
  if (shape.over_store) {
    const auto store = std::make_shared<FakeStore>(static_cast<int>(shape.nodes.delays.max_us));
    on_threads(size, [&](int rank) { body(*join_over(store, Group{rank, size}, shape)); });
    return;
  }
  auto ranks = make_thread_rendezvous(size, shape.nodes);
  on_threads(size, [&](int rank) { body(*ranks[static_cast<std::size_t>(rank)]); });
}

inline void on_thread_ranks(int size,
                            const std::function<void(Rendezvous&)>& body,
                            const ThreadNodes& nodes = {}) {
  on_thread_ranks(size, body, RankShape{nodes});
}

/// Every way in which `size` ranks are told to share nodes: together; one, two and three a node
/// (the last node may have fewer); dealt to two nodes in turn. Apart from the first all of them
/// delay messages. And over a store: together, one a node with messages in many chunks, and dealt
/// to two nodes by a store that is slow to answer.
inline std::vector<RankShape> node_shapes(int size) {
  std::vector<RankShape> shapes{RankShape{}};
  for (int ranks_per_node = 1; ranks_per_node < size; ++ranks_per_node) {
    shapes.push_back(RankShape{ThreadNodes{ranks_per_node, {}, MessageDelays{1, 200}}});
  }
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(rank % 2 == 0 ? "even" : "odd");
  if (size > 2) shapes.push_back(RankShape{ThreadNodes{0, keys, MessageDelays{2, 200}}});
  shapes.push_back(RankShape{{}, true});
  if (size > 1) shapes.push_back(RankShape{ThreadNodes{1, {}, {}}, true, 10'000});
  if (size > 2) shapes.push_back(RankShape{ThreadNodes{0, keys, MessageDelays{2, 20}}, true});
  return shapes;
}

inline std::string describe(int size, const RankShape& shape) {
  return std::to_string(size) + " ranks" + (shape.over_store ? " over a store, " : ", ") +
         (!shape.nodes.keys.empty() ? std::string("dealt to two nodes")
          : shape.nodes.ranks_per_node == 0
              ? std::string("one node")
              : std::to_string(shape.nodes.ranks_per_node) + " a node");
}

/// on_thread_ranks for each of node_shapes().
inline void on_all_node_shapes(int size, const std::function<void(Rendezvous&)>& body) {
  for (const RankShape& shape : node_shapes(size)) {
    SCOPED_TRACE(describe(size, shape));
    on_thread_ranks(size, body, shape);
  }
}

/// Pauses of 0..max_us, different on each rank, so that every rank is sometimes the slow one.
class Pauses {
 public:
  Pauses(int rank, int max_us) : random_(static_cast<unsigned>(rank) + 1), pause_(0, max_us) {}
  void operator()() {
    const int us = pause_(random_);
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

 private:
  std::mt19937 random_;
  std::uniform_int_distribution<int> pause_;
};

}  // namespace tandem::comm
