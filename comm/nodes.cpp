#include "comm/nodes.h"

#include <tandem/error.h>

#include <map>

namespace tandem::comm {

Nodes::Nodes(const std::vector<std::string>& key_of_rank) {
  std::map<std::string, int> numbers;
  for (std::size_t rank = 0; rank < key_of_rank.size(); ++rank) {
    const int node = numbers.try_emplace(key_of_rank[rank], count()).first->second;
    if (node == count()) ranks_of_.emplace_back();
    std::vector<int>& ranks = ranks_of_[static_cast<std::size_t>(node)];
    node_of_.push_back(node);
    index_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
  }
}

Nodes Nodes::consecutive(int size, int ranks_per_node) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(forced_node(rank, ranks_per_node));
  return Nodes(keys);
}

int Nodes::relay(int source, int node) const {
  // By the source's place in its own node, so that the work is spread.
  const std::vector<int>& ranks = ranks_of(node);
  return ranks[static_cast<std::size_t>(index_[static_cast<std::size_t>(source)]) % ranks.size()];
}

std::string forced_node(int rank, int ranks_per_node) {
  if (ranks_per_node < 0) {
    throw InvalidArgument("ranks_per_node is " + std::to_string(ranks_per_node) +
                          "; it is >= 0 (0: as the hosts say)");
  }
  return ranks_per_node == 0 ? std::string() : std::to_string(rank / ranks_per_node);
}

}  // namespace tandem::comm
