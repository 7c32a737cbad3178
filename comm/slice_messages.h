// comm/slice_messages.h: the reductions of one channel, as far as they cross nodes: of each post
// every rank of another node is sent the elements it folds, straight from staging.
//
// S1 A post is one message to each rank of another node, empty or not, in order of the posts, its
//    tag the wire type. So the k-th message of a rank is its k-th post.
// S2 Messages are received ahead of their fold, but no more than kAhead of a rank at once: a rank
//    that is behind holds its peers up instead of filling its memory.
// Thread safety: any thread; next(), part_of() and release() by the one that folds.
// Called by comm/shared_channel.
#pragma once

#include "comm/data_plane.h"
#include "comm/messenger.h"
#include "comm/nodes.h"

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace tandem::comm {

class SliceMessages {
 public:
  static constexpr std::size_t kAhead = 2;

  SliceMessages(const Nodes& nodes, int rank, std::unique_ptr<Messenger> messenger);

  /// Starts sending this rank's next post. `data` null: zeros. `keep` owns its memory.
  void post(const std::byte* data,
            std::size_t bytes,
            kernels::Dtype wire,
            const PartOfRank& part,
            std::shared_ptr<const void> keep);
  /// Moves everything on and says what is still on its way.
  Traffic progress();

  /// Posts below this number have left this rank.
  [[nodiscard]] PostId sent() const;
  /// Ranks that have not received all of the posts below `post`.
  [[nodiscard]] std::vector<int> not_sent(PostId post) const;
  /// Ranks whose part of the next post to fold is not here.
  [[nodiscard]] std::vector<int> not_received() const;

  struct Part {
    const std::byte* data = nullptr;  // valid until release()
    std::size_t bytes = 0;
    kernels::Dtype wire = kernels::Dtype::kFloat32;
  };
  /// Of the next post to fold; it has been received.
  [[nodiscard]] Part part_of(int rank) const;
  /// The next post has been folded.
  void release();

  /// Receive buffers, in use or kept.
  [[nodiscard]] std::size_t buffer_bytes() const;
  /// Lets buffers go that have not been used for `idle_generations` calls.
  void trim(int idle_generations);

 private:
  struct Buffer;
  struct Incoming {
    std::shared_ptr<Buffer> buffer;
    std::size_t bytes = 0;
    kernels::Dtype wire = kernels::Dtype::kFloat32;
    std::unique_ptr<Transfer> transfer;  // null when received
  };
  struct Peer {
    int rank = 0;
    std::vector<Incoming> incoming;  // by post, the next to fold first
  };
  struct Outgoing {
    PostId post = 0;
    int to = 0;
    std::unique_ptr<Transfer> transfer;
  };

  std::shared_ptr<Buffer> buffer_of(std::size_t bytes);
  void receive(Peer& peer);

  const int rank_;
  const std::unique_ptr<Messenger> messenger_;
  mutable std::mutex mutex_;
  std::vector<Peer> peers_;        // ranks of other nodes
  std::deque<Outgoing> outgoing_;  // by post
  PostId posts_ = 0;
  std::vector<std::shared_ptr<Buffer>> free_;
  std::size_t buffer_bytes_ = 0;
  std::int64_t generation_ = 0;
};

}  // namespace tandem::comm
