#include "comm/slice_messages.h"

#include <tandem/error.h>

#include <algorithm>
#include <new>
#include <utility>

namespace tandem::comm {

struct SliceMessages::Buffer {
  explicit Buffer(std::size_t size)
      : bytes(size), data(static_cast<std::byte*>(::operator new (size, std::align_val_t{64}))) {}
  ~Buffer() { ::operator delete (data, std::align_val_t{64}); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&&) = delete;
  Buffer& operator=(Buffer&&) = delete;

  const std::size_t bytes;
  std::byte* const data;
  std::int64_t last_used = 0;  // generation
};

SliceMessages::SliceMessages(const Nodes& nodes, int rank, std::unique_ptr<Messenger> messenger)
    : rank_(rank), messenger_(std::move(messenger)) {
  for (int node = 0; node < nodes.count(); ++node) {
    if (node == nodes.node_of(rank)) continue;
    for (const int other : nodes.ranks_of(node)) peers_.push_back(Peer{other, {}});
  }
  // Each rank begins with its right neighbour, so that not all of them send to the same rank at
  // once.
  std::sort(peers_.begin(), peers_.end(),
            [](const Peer& a, const Peer& b) { return a.rank < b.rank; });
  std::rotate(peers_.begin(),
              std::find_if(peers_.begin(), peers_.end(),
                           [&](const Peer& peer) { return peer.rank > rank_; }),
              peers_.end());
}

void SliceMessages::post(const std::byte* data,
                         std::size_t bytes,
                         kernels::Dtype wire,
                         const PartOfRank& part,
                         std::shared_ptr<const void> keep) {
  const std::size_t element = kernels::bytes_of(wire);
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    std::size_t begin = 0;
    std::size_t end = 0;
    if (data != nullptr) {
      const ElementRange range = part(peer.rank);
      begin = static_cast<std::size_t>(range.begin) * element;
      end = static_cast<std::size_t>(range.end) * element;
      if (range.begin < 0 || begin > end || end > bytes) {
        throw Mismatch("elements [" + std::to_string(range.begin) + ", " +
                       std::to_string(range.end) + ") of a post are rank " +
                       std::to_string(peer.rank) + "'s, but rank " + std::to_string(rank_) +
                       " posts " + std::to_string(bytes / element) + " (D1)");
      }
    }
    outgoing_.push_back(Outgoing{
        posts_, peer.rank,
        messenger_->send(peer.rank, static_cast<int>(wire), data + begin, end - begin, keep)});
  }
  ++posts_;
}

std::shared_ptr<SliceMessages::Buffer> SliceMessages::buffer_of(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  // The smallest that is large enough; slices of a channel are much alike.
  auto best = free_.end();
  for (auto one = free_.begin(); one != free_.end(); ++one) {
    if ((*one)->bytes >= bytes && (best == free_.end() || (*one)->bytes < (*best)->bytes)) {
      best = one;
    }
  }
  if (best == free_.end()) {
    if (!free_.empty()) {  // too small: replaced, or every size would be kept
      buffer_bytes_ -= free_.back()->bytes;
      free_.pop_back();
    }
    buffer_bytes_ += bytes;
    return std::make_shared<Buffer>(bytes);
  }
  std::shared_ptr<Buffer> buffer = std::move(*best);
  free_.erase(best);
  return buffer;
}

void SliceMessages::receive(Peer& peer) {
  while (peer.incoming.size() < kAhead) {
    const auto arrival = messenger_->probe(peer.rank);
    if (!arrival) break;
    Incoming& incoming = peer.incoming.emplace_back();
    incoming.bytes = arrival->bytes();
    incoming.wire = static_cast<kernels::Dtype>(arrival->tag());
    incoming.buffer = buffer_of(incoming.bytes);
    incoming.transfer =
        arrival->receive(incoming.buffer ? incoming.buffer->data : nullptr, incoming.buffer);
  }
  for (Incoming& incoming : peer.incoming) {
    if (incoming.transfer && incoming.transfer->done()) incoming.transfer.reset();
  }
}

Traffic SliceMessages::progress() {
  const std::lock_guard lock(mutex_);
  Traffic traffic;
  for (Peer& peer : peers_) {
    receive(peer);
    for (const Incoming& incoming : peer.incoming) {
      traffic.receiving = traffic.receiving || incoming.transfer != nullptr;
    }
  }
  for (Outgoing& outgoing : outgoing_) {
    if (outgoing.transfer->done()) outgoing.transfer.reset();
  }
  std::erase_if(outgoing_, [](const Outgoing& outgoing) { return !outgoing.transfer; });
  traffic.sending = !outgoing_.empty();
  return traffic;
}

PostId SliceMessages::sent() const {
  const std::lock_guard lock(mutex_);
  return outgoing_.empty() ? posts_ : outgoing_.front().post;
}

std::vector<int> SliceMessages::not_sent(PostId post) const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const Outgoing& outgoing : outgoing_) {
    if (outgoing.post < post) ranks.push_back(outgoing.to);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<int> SliceMessages::not_received() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const Peer& peer : peers_) {
    if (peer.incoming.empty() || peer.incoming.front().transfer) ranks.push_back(peer.rank);
  }
  return ranks;
}

SliceMessages::Part SliceMessages::part_of(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto peer =
      std::find_if(peers_.begin(), peers_.end(), [&](const Peer& one) { return one.rank == rank; });
  const Incoming& incoming = peer->incoming.front();
  return Part{incoming.buffer ? incoming.buffer->data : nullptr, incoming.bytes, incoming.wire};
}

void SliceMessages::release() {
  const std::lock_guard lock(mutex_);
  for (Peer& peer : peers_) {
    if (auto& buffer = peer.incoming.front().buffer) {
      buffer->last_used = generation_;
      free_.push_back(std::move(buffer));
    }
    peer.incoming.erase(peer.incoming.begin());
  }
}

std::size_t SliceMessages::buffer_bytes() const {
  const std::lock_guard lock(mutex_);
  return buffer_bytes_;
}

void SliceMessages::trim(int idle_generations) {
  const std::lock_guard lock(mutex_);
  ++generation_;
  std::erase_if(free_, [&](const std::shared_ptr<Buffer>& buffer) {
    if (generation_ - buffer->last_used < idle_generations) return false;
    buffer_bytes_ -= buffer->bytes;
    return true;
  });
}

}  // namespace tandem::comm
