// Ranks as threads of one process, for the tests of comm.
#pragma once

#include "comm/rendezvous.h"

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tandem::comm {

/// Long enough for a loaded machine; no test that passes waits for it.
inline Deadline patient() { return Deadline::after(std::chrono::seconds(60)); }
inline Deadline soon() { return Deadline::after(std::chrono::milliseconds(150)); }

/// Runs `body` once a rank, each in its own thread; what escapes fails the test with its rank.
inline void on_thread_ranks(int size,
                            const std::function<void(Rendezvous&)>& body,
                            const ThreadNodes& nodes = {}) {
  auto ranks = make_thread_rendezvous(size, nodes);
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*ranks[static_cast<std::size_t>(rank)]);
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

/// Every way in which `size` ranks are told to share nodes: together; one, two and three a node
/// (the last node may have fewer); dealt to two nodes in turn. Apart from the first all of them
/// delay messages.
inline std::vector<ThreadNodes> node_shapes(int size) {
  std::vector<ThreadNodes> shapes{ThreadNodes{}};
  for (int ranks_per_node = 1; ranks_per_node < size; ++ranks_per_node) {
    shapes.push_back(ThreadNodes{ranks_per_node, {}, MessageDelays{1, 200}});
  }
  if (size > 2) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < size; ++rank) keys.push_back(rank % 2 == 0 ? "even" : "odd");
    shapes.push_back(ThreadNodes{0, keys, MessageDelays{2, 200}});
  }
  return shapes;
}

inline std::string describe(int size, const ThreadNodes& nodes) {
  return std::to_string(size) + " ranks, " +
         (!nodes.keys.empty()         ? std::string("dealt to two nodes")
          : nodes.ranks_per_node == 0 ? std::string("one node")
                                      : std::to_string(nodes.ranks_per_node) + " a node");
}

/// on_thread_ranks for each of node_shapes().
inline void on_all_node_shapes(int size, const std::function<void(Rendezvous&)>& body) {
  for (const ThreadNodes& nodes : node_shapes(size)) {
    SCOPED_TRACE(describe(size, nodes));
    on_thread_ranks(size, body, nodes);
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
