#include "comm/message_control_plane.h"

#include "comm/futex.h"
#include "comm/messenger.h"
#include "comm/pacer.h"
#include "comm/round_format.h"
#include <tandem/error.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace tandem::comm {

namespace {

using Bytes = std::shared_ptr<std::vector<std::byte>>;

constexpr int kRoundTag = 0;
constexpr int kAbortTag = 1;
constexpr int kSpins = 50;  // about as many microseconds

Bytes make_bytes(std::size_t bytes) { return std::make_shared<std::vector<std::byte>>(bytes); }

/// What has come from each rank and what has not left for it yet. Under the plane's lock. Messages
/// that fail (MPI, or the store they go through) are an abort of this rank's own, with their words.
class Exchange {
 public:
  struct Peer {
    RoundId posted = 0;               // rounds of it that are here
    std::map<RoundId, Bytes> rounds;  // those not taken
    bool said_abort = false;          // posts nothing any more
  };

  Exchange(Group group, std::unique_ptr<Messenger> messenger)
      : group_(group),
        messenger_(std::move(messenger)),
        peers_(static_cast<std::size_t>(group.size)),
        incoming_(static_cast<std::size_t>(group.size)) {}

  [[nodiscard]] const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] const std::optional<std::string>& abort_text() const { return abort_text_; }
  /// No message comes or leaves any more.
  [[nodiscard]] bool failed() const { return failed_; }

  void post(RoundId round, const Bytes& bytes) {
    send_to_all(kRoundTag, bytes, round);
    Peer& mine = peers_[static_cast<std::size_t>(group_.rank)];
    mine.rounds[round] = bytes;
    mine.posted = round + 1;
  }

  void abort(const std::string& text) {
    if (abort_text_) return;
    abort_text_ = text.substr(0, kAbortTextBytes);
    aborted_at_ = Clock::now();
    peers_[static_cast<std::size_t>(group_.rank)].said_abort = true;
    const Bytes word = make_bytes(abort_text_->size());
    std::transform(abort_text_->begin(), abort_text_->end(), word->begin(),
                   [](char c) { return static_cast<std::byte>(c); });
    send_to_all(kAbortTag, word, 0);
  }

  /// Takes what has come; true if anything has changed.
  bool progress() {
    if (failed_) return false;
    try {
      return look();
    } catch (const SystemError& error) {
      fail(error);
      return true;
    }
  }

  /// All ranks' posts of `round` are here, and this rank's have left.
  [[nodiscard]] bool complete(RoundId round) const {
    const bool here = std::all_of(peers_.begin(), peers_.end(),
                                  [&](const Peer& peer) { return peer.posted > round; });
    // Nobody is served any more after an abort, so nobody waits to serve.
    return here && (abort_text_ ||
                    std::none_of(outgoing_.begin(), outgoing_.end(), [&](const Outgoing& outgoing) {
                      return outgoing.round == round;
                    }));
  }

  /// Aborted, and some rank will never post `round` (or is silent for too long).
  [[nodiscard]] bool dead(RoundId round) const {
    if (!abort_text_) return false;
    return grace_over_ || std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
             return peer.said_abort && peer.posted <= round;
           });
  }

  void drop(RoundId round) {
    for (Peer& peer : peers_) peer.rounds.erase(round);
  }

 private:
  struct Incoming {
    int tag = 0;
    Bytes bytes;
    std::unique_ptr<Transfer> transfer;
  };
  struct Outgoing {
    RoundId round = 0;
    std::unique_ptr<Transfer> transfer;
  };

  bool look() {
    while (auto arrival = messenger_->probe(kAnyRank)) {
      Incoming incoming{arrival->tag(), make_bytes(arrival->bytes()), nullptr};
      incoming.transfer = arrival->receive(incoming.bytes->data(), incoming.bytes);
      incoming_[static_cast<std::size_t>(arrival->from())].push_back(std::move(incoming));
    }
    bool moved = false;
    for (std::size_t rank = 0; rank < incoming_.size(); ++rank) {
      std::deque<Incoming>& queue = incoming_[rank];
      for (; !queue.empty() && queue.front().transfer->done(); queue.pop_front()) {
        take(peers_[rank], queue.front());
        moved = true;
      }
    }
    for (Outgoing& outgoing : outgoing_) {
      if (outgoing.transfer->done()) outgoing.transfer.reset();
    }
    const std::size_t left =
        std::erase_if(outgoing_, [](const Outgoing& outgoing) { return !outgoing.transfer; });
    if (abort_text_ && !grace_over_ && Clock::now() - aborted_at_ > kAbortGrace) {
      grace_over_ = true;
      moved = true;
    }
    return moved || left != 0;
  }

  void send_to_all(int tag, const Bytes& bytes, RoundId round) {
    if (failed_) return;
    try {
      for (int step = 1; step < group_.size; ++step) {
        const int to = (group_.rank + step) % group_.size;
        outgoing_.push_back(
            Outgoing{round, messenger_->send(to, tag, bytes->data(), bytes->size(), bytes)});
      }
    } catch (const SystemError& error) {
      fail(error);
    }
  }

  void fail(const SystemError& error) {
    failed_ = true;
    grace_over_ = true;  // nobody can be heard any more
    if (!abort_text_) abort_text_ = error.what();
  }

  void take(Peer& from, const Incoming& incoming) {
    if (incoming.tag == kAbortTag) {
      from.said_abort = true;
      abort(std::string(reinterpret_cast<const char*>(incoming.bytes->data()),
                        incoming.bytes->size()));
    } else {
      from.rounds[from.posted++] = incoming.bytes;
    }
  }

  const Group group_;
  const std::unique_ptr<Messenger> messenger_;
  std::vector<Peer> peers_;                     // by rank, this one's own as well
  std::vector<std::deque<Incoming>> incoming_;  // by rank, in order
  std::vector<Outgoing> outgoing_;
  std::optional<std::string> abort_text_;
  Clock::time_point aborted_at_;
  bool grace_over_ = false;
  bool failed_ = false;
};

class MessageControlPlane final : public ControlPlane {
 public:
  MessageControlPlane(Group group, std::unique_ptr<Messenger> messenger)
      : group_(group),
        spin_(may_spin(group.size)),
        exchange_(std::make_unique<Exchange>(group, std::move(messenger))) {}

  [[nodiscard]] Group group() const override { return group_; }

  void reserve(std::size_t bytes) override { check_round_bytes(bytes, group_.rank); }

  RoundId post(const Message& message) override { return post_any(message); }
  RoundId post_text(const std::string& text) override { return post_any(text); }

  std::optional<Message> test(RoundId round) override {
    const std::lock_guard lock(mutex_);
    if (!complete(round)) return std::nullopt;
    const Taken taken(*this, round);
    agree_on_heads(heads(round), RoundKind::kMessage, round);
    Message merged;
    read_round(bytes_of(0, round), merged);
    Message other;
    for (int rank = 1; rank < group_.size; ++rank) {
      read_round(bytes_of(rank, round), other);
      merged.merge(other);
    }
    return merged;
  }

  std::optional<std::vector<std::string>> test_texts(RoundId round) override {
    const std::lock_guard lock(mutex_);
    if (!complete(round)) return std::nullopt;
    const Taken taken(*this, round);
    agree_on_heads(heads(round), RoundKind::kText, round);
    std::vector<std::string> texts;
    for (int rank = 0; rank < group_.size; ++rank) {
      texts.push_back(read_text(bytes_of(rank, round)));
    }
    return texts;
  }

  [[nodiscard]] std::vector<int> missing(RoundId round) const override {
    const std::lock_guard lock(mutex_);
    progress();
    std::vector<int> ranks;
    for (int rank = 0; rank < group_.size; ++rank) {
      if (exchange_->peer(rank).posted <= round) ranks.push_back(rank);
    }
    return ranks;
  }

  [[nodiscard]] std::uint32_t change() const override {
    return change_.load(std::memory_order_acquire);
  }

  void wait_for_change(std::uint32_t seen, Clock::time_point until) override {
    for (int look = 0;; ++look) {
      std::chrono::microseconds pause{};
      {
        const std::lock_guard lock(mutex_);
        progress();
        pause = pacer_.pause();
      }
      if (change() != seen) return;
      const auto left = until - Clock::now();
      if (left <= Clock::duration::zero()) return;
      if (spin_ && look < kSpins) {
        spin_once();
      } else {
        std::this_thread::sleep_for(std::min<Clock::duration>(left, pause));
      }
    }
  }

  void wake() override { changed(); }

  void abort(const std::string& text) override {
    const std::lock_guard lock(mutex_);
    progress();  // another rank may have been first
    exchange_->abort(text);
    changed();
  }

  [[nodiscard]] std::optional<std::string> aborted() const override {
    const std::lock_guard lock(mutex_);
    progress();
    return exchange_->abort_text();
  }

  [[nodiscard]] std::uint64_t posted_bytes() const override {
    return posted_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t posted_rounds() const override {
    return posted_rounds_.load(std::memory_order_relaxed);
  }

 private:
  /// A round is taken once, whatever it turns out to be.
  class Taken {
   public:
    Taken(MessageControlPlane& plane, RoundId round) : plane_(plane), round_(round) {
      plane_.rounds_.take(round);
    }
    ~Taken() { plane_.exchange_->drop(round_); }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    Taken(Taken&&) = delete;
    Taken& operator=(Taken&&) = delete;

   private:
    MessageControlPlane& plane_;
    const RoundId round_;
  };

  template <class Words>
  RoundId post_any(const Words& words) {
    const std::lock_guard lock(mutex_);
    rounds_.check_post();
    const RoundHead head = RoundHead::of(words);
    check_round_bytes(head.payload_bytes(), group_.rank);
    progress();
    pacer_.reset();
    const RoundId round = rounds_.add();
    posted_rounds_.fetch_add(1, std::memory_order_relaxed);
    posted_bytes_.fetch_add(head.payload_bytes(), std::memory_order_relaxed);
    if (!exchange_->abort_text()) {  // else it is dead (A2)
      const Bytes bytes = make_bytes(sizeof(head) + head.payload_bytes());
      write_round(bytes->data(), head, words);
      exchange_->post(round, bytes);
    }
    changed();
    return round;
  }

  // All below under the lock.

  /// Taking what has come changes nothing that a caller of a const member could see otherwise than
  /// by waiting.
  void progress() const {
    if (!exchange_->progress()) return;
    pacer_.reset();
    changed();
  }
  void changed() const { change_.fetch_add(1, std::memory_order_release); }

  [[nodiscard]] bool complete(RoundId round) const {
    rounds_.check_open(round);
    progress();
    if (exchange_->complete(round)) return true;
    if (exchange_->dead(round)) {
      if (exchange_->failed()) throw SystemError(*exchange_->abort_text());
      throw WorldBroken(*exchange_->abort_text());
    }
    return false;
  }

  [[nodiscard]] const std::byte* bytes_of(int rank, RoundId round) const {
    return exchange_->peer(rank).rounds.at(round)->data();
  }

  [[nodiscard]] std::vector<RoundHead> heads(RoundId round) const {
    std::vector<RoundHead> heads;
    for (int rank = 0; rank < group_.size; ++rank)
      heads.push_back(read_head(bytes_of(rank, round)));
    return heads;
  }

  const Group group_;
  const bool spin_;
  mutable std::mutex mutex_;
  const std::unique_ptr<Exchange> exchange_;
  OpenRounds rounds_{group_.rank};
  mutable Pacer pacer_;  // since the last post or arrival, however many calls wait in between
  mutable std::atomic<std::uint32_t> change_{0};
  std::atomic<std::uint64_t> posted_bytes_{0};
  std::atomic<std::uint64_t> posted_rounds_{0};
};

}  // namespace

std::unique_ptr<ControlPlane> make_message_control_plane(Rendezvous& rendezvous,
                                                         Deadline deadline) {
  return std::make_unique<MessageControlPlane>(
      rendezvous.group(),
      rendezvous.make_messenger("making the control plane of the world", deadline));
}

}  // namespace tandem::comm
