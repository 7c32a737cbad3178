#include "comm/gather_messages.h"

#include <tandem/error.h>

#include <string>
#include <utility>

namespace tandem::comm {

GatherMessages::GatherMessages(const Nodes& nodes, int rank, std::unique_ptr<Messenger> messenger)
    : nodes_(nodes), rank_(rank), messenger_(std::move(messenger)) {}

void GatherMessages::begin_sending(ByteRange mine,
                                   const std::byte* parameters,
                                   std::shared_ptr<const void> keep) {
  if (mine.begin == mine.end) return;
  const std::lock_guard lock(mutex_);
  const int home = nodes_.node_of(rank_);
  for (int step = 1; step < nodes_.count(); ++step) {
    const int to = nodes_.relay(rank_, (home + step) % nodes_.count());
    sending_.push_back(
        Sending{to, messenger_->send(to, 0, parameters + mine.begin, mine.end - mine.begin, keep)});
  }
}

std::size_t GatherMessages::begin_receiving(const std::function<ByteRange(int rank)>& of_rank,
                                            std::byte* parameters,
                                            std::shared_ptr<const void> keep) {
  const std::lock_guard lock(mutex_);
  into_ = parameters;
  keep_ = std::move(keep);
  const int home = nodes_.node_of(rank_);
  std::size_t bytes = 0;
  for (int node = 0; node < nodes_.count(); ++node) {
    if (node == home) continue;
    for (const int source : nodes_.ranks_of(node)) {
      if (nodes_.relay(source, home) != rank_) continue;
      const ByteRange range = of_rank(source);
      if (range.begin == range.end) continue;
      receiving_.push_back(Receiving{source, range, nullptr});
      bytes += range.end - range.begin;
    }
  }
  return bytes;
}

Traffic GatherMessages::progress() {
  const std::lock_guard lock(mutex_);
  Traffic traffic;
  for (Sending& sending : sending_) {
    if (sending.transfer->done()) sending.transfer.reset();
  }
  std::erase_if(sending_, [](const Sending& sending) { return !sending.transfer; });
  for (Receiving& receiving : receiving_) {
    if (!receiving.transfer) start(receiving);
    receiving.done = receiving.transfer && receiving.transfer->done();
    traffic.receiving = traffic.receiving || (receiving.transfer && !receiving.done);
  }
  std::erase_if(receiving_, [](const Receiving& receiving) { return receiving.done; });
  traffic.sending = !sending_.empty();
  return traffic;
}

void GatherMessages::start(Receiving& receiving) {
  const auto arrival = messenger_->probe(receiving.from);
  if (!arrival) return;
  const std::size_t expected = receiving.range.end - receiving.range.begin;
  if (arrival->bytes() != expected) {
    throw Mismatch("rank " + std::to_string(receiving.from) + " sends " +
                   std::to_string(arrival->bytes()) + " bytes of parameters to rank " +
                   std::to_string(rank_) + ", which expects " + std::to_string(expected));
  }
  receiving.transfer = arrival->receive(into_ + receiving.range.begin, keep_);
}

std::vector<int> GatherMessages::not_sent() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const Sending& sending : sending_) ranks.push_back(sending.to);
  return ranks;
}

std::vector<int> GatherMessages::not_received() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const Receiving& receiving : receiving_) ranks.push_back(receiving.from);
  return ranks;
}

}  // namespace tandem::comm
