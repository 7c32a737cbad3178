// comm/nodes.h: which ranks share a node, that is memory; the others are reached by messages.
//
// The same on all ranks of a world. Nodes are numbered by their first ranks; ranks of a node are
// ascending, and need not be consecutive.
// Called by comm (rendezvous, planes).
#pragma once

#include <string>
#include <vector>

namespace tandem::comm {

class Nodes {
 public:
  /// Ranks whose keys are equal share a node.
  explicit Nodes(const std::vector<std::string>& key_of_rank);
  /// Every `ranks_per_node` consecutive ranks (the last node may have fewer); 0: all together.
  /// Throws InvalidArgument below 0.
  static Nodes consecutive(int size, int ranks_per_node);

  [[nodiscard]] int count() const { return static_cast<int>(ranks_of_.size()); }
  [[nodiscard]] int node_of(int rank) const { return node_of_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const std::vector<int>& ranks_of(int node) const {
    return ranks_of_[static_cast<std::size_t>(node)];
  }
  [[nodiscard]] bool is_first(int rank) const { return ranks_of(node_of(rank)).front() == rank; }
  [[nodiscard]] bool together(int a, int b) const { return node_of(a) == node_of(b); }
  /// The rank of `node` that receives what `source`, of another node, has for all of them.
  [[nodiscard]] int relay(int source, int node) const;

 private:
  std::vector<int> node_of_;                // by rank
  std::vector<int> index_;                  // by rank, among the ranks of its node
  std::vector<std::vector<int>> ranks_of_;  // by node
};

/// For keys: "rank / ranks_per_node", or nothing for 0. Throws InvalidArgument below 0.
[[nodiscard]] std::string forced_node(int rank, int ranks_per_node);

}  // namespace tandem::comm
