// comm/gather_messages.h: the gathers of one channel, as far as they cross nodes: a rank sends its
// part once to each other node, to that node's relay for it (nodes.h), which receives it in place.
//
// T1 A part that is not empty is one message to each relay, in order of the gathers; ranges are the
//    same on all ranks, so an empty one is sent by nobody and expected by nobody.
// T2 A gather's messages are received during this rank's own gather only: before it, others may
//    still read what would be overwritten.
// Thread safety: begin_*() by one thread at a time; the rest by any.
// Called by comm/shared_channel.
#pragma once

#include "comm/data_plane.h"
#include "comm/messenger.h"
#include "comm/nodes.h"

#include <memory>
#include <mutex>
#include <vector>

namespace tandem::comm {

class GatherMessages {
 public:
  GatherMessages(const Nodes& nodes, int rank, std::unique_ptr<Messenger> messenger);

  /// Starts sending this rank's part of `parameters`, which `keep` owns.
  void begin_sending(ByteRange mine, const std::byte* parameters, std::shared_ptr<const void> keep);
  /// Begins to receive what this rank relays. Returns how many bytes that is.
  std::size_t begin_receiving(const std::function<ByteRange(int rank)>& of_rank,
                              std::byte* parameters,
                              std::shared_ptr<const void> keep);
  /// Moves everything on and says what is still on its way. Throws Mismatch if a part is not as
  /// long as `of_rank` said.
  Traffic progress();

  /// Relays, and sources, that are waited for.
  [[nodiscard]] std::vector<int> not_sent() const;
  [[nodiscard]] std::vector<int> not_received() const;

 private:
  struct Sending {
    int to = 0;
    std::unique_ptr<Transfer> transfer;
  };
  struct Receiving {
    int from = 0;
    ByteRange range;
    std::unique_ptr<Transfer> transfer;  // null: not found yet
    bool done = false;
  };

  void start(Receiving& receiving);

  const Nodes& nodes_;
  const int rank_;
  const std::unique_ptr<Messenger> messenger_;
  mutable std::mutex mutex_;
  std::vector<Sending> sending_;
  std::vector<Receiving> receiving_;
  std::byte* into_ = nullptr;
  std::shared_ptr<const void> keep_;  // of into_
};

}  // namespace tandem::comm
