#include "comm/mailbox_messenger.h"

#include "comm/deadline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

namespace tandem::comm {

namespace {

struct Letter {
  int tag = 0;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> keep;  // the sender's memory, or the letter's own copy
  Clock::time_point findable_at;
  Clock::duration receiving_takes{};
  std::atomic<bool> taken{false};  // the sender's memory is not looked at any more
};

class Sending final : public Transfer {
 public:
  explicit Sending(std::shared_ptr<Letter> letter) : letter_(std::move(letter)) {}
  [[nodiscard]] bool done() override {
    return letter_ == nullptr || letter_->taken.load(std::memory_order_acquire);
  }

 private:
  const std::shared_ptr<Letter> letter_;  // null: copied already
};

class Receiving final : public Transfer {
 public:
  Receiving(std::shared_ptr<Letter> letter, std::byte* into, std::shared_ptr<const void> keep)
      : letter_(std::move(letter)),
        into_(into),
        keep_(std::move(keep)),
        ready_at_(Clock::now() + letter_->receiving_takes) {}

  [[nodiscard]] bool done() override {
    if (letter_ == nullptr) return true;
    if (Clock::now() < ready_at_) return false;
    if (letter_->bytes != 0) std::memcpy(into_, letter_->data, letter_->bytes);
    letter_->taken.store(true, std::memory_order_release);
    letter_.reset();
    return true;
  }

 private:
  std::shared_ptr<Letter> letter_;  // null when done
  std::byte* const into_;
  const std::shared_ptr<const void> keep_;
  const Clock::time_point ready_at_;
};

class Found final : public Arrival {
 public:
  Found(int from, std::shared_ptr<Letter> letter)
      : Arrival(from, letter->tag, letter->bytes), letter_(std::move(letter)) {}

  [[nodiscard]] std::unique_ptr<Transfer> receive(std::byte* into,
                                                  std::shared_ptr<const void> keep) override {
    return std::make_unique<Receiving>(std::move(letter_), into, std::move(keep));
  }

 private:
  std::shared_ptr<Letter> letter_;
};

std::uint64_t mixed(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

}  // namespace

class MailboxOffice {
 public:
  MailboxOffice(int size, MessageDelays delays)
      : size_(size),
        delays_(delays),
        boxes_(static_cast<std::size_t>(size) * static_cast<std::size_t>(size)) {}

  void put(int from, int to, const std::shared_ptr<Letter>& letter) {
    const std::lock_guard lock(mutex_);
    Box& box = box_of(from, to);
    const std::uint64_t number = box.sent++;
    letter->findable_at =
        std::max(box.last_findable_at, Clock::now() + pause(from, to, 2 * number));
    letter->receiving_takes = pause(from, to, 2 * number + 1);
    box.last_findable_at = letter->findable_at;
    box.letters.push_back(letter);
  }

  std::unique_ptr<Arrival> take(int from, int to) {
    const std::lock_guard lock(mutex_);
    Box& box = box_of(from, to);
    if (box.letters.empty() || box.letters.front()->findable_at > Clock::now()) return nullptr;
    std::shared_ptr<Letter> letter = std::move(box.letters.front());
    box.letters.pop_front();
    return std::make_unique<Found>(from, std::move(letter));
  }

  [[nodiscard]] int size() const { return size_; }

 private:
  struct Box {
    std::deque<std::shared_ptr<Letter>> letters;
    std::uint64_t sent = 0;
    Clock::time_point last_findable_at;
  };

  Box& box_of(int from, int to) { return boxes_[static_cast<std::size_t>(from * size_ + to)]; }

  [[nodiscard]] std::chrono::microseconds pause(int from, int to, std::uint64_t number) const {
    if (delays_.max_us <= 0) return std::chrono::microseconds(0);
    const auto pair = static_cast<std::uint64_t>(from * size_ + to);
    const std::uint64_t random = mixed(mixed(delays_.seed + pair * 1000003U) + number);
    return std::chrono::microseconds(random % (static_cast<std::uint64_t>(delays_.max_us) + 1));
  }

  const int size_;
  const MessageDelays delays_;
  std::mutex mutex_;
  std::vector<Box> boxes_;  // by (from, to)
};

namespace {

class MailboxMessenger final : public Messenger {
 public:
  MailboxMessenger(std::shared_ptr<MailboxOffice> office, int rank)
      : office_(std::move(office)), rank_(rank) {}

  [[nodiscard]] std::unique_ptr<Transfer> send(int to,
                                               int tag,
                                               const std::byte* data,
                                               std::size_t bytes,
                                               std::shared_ptr<const void> keep) override {
    auto letter = std::make_shared<Letter>();
    letter->tag = tag;
    letter->bytes = bytes;
    const bool eager = bytes <= kEagerBytes;
    if (eager) {
      auto copy = std::make_shared<std::vector<std::byte>>(bytes);
      if (bytes != 0) std::memcpy(copy->data(), data, bytes);
      letter->data = copy->data();
      letter->keep = std::move(copy);
    } else {
      letter->data = data;
      letter->keep = std::move(keep);
    }
    office_->put(rank_, to, letter);
    return std::make_unique<Sending>(eager ? nullptr : letter);
  }

  [[nodiscard]] std::unique_ptr<Arrival> probe(int from) override {
    if (from != kAnyRank) return office_->take(from, rank_);
    for (int other = 0; other < office_->size(); ++other) {
      if (auto arrival = office_->take(other, rank_)) return arrival;
    }
    return nullptr;
  }

 private:
  const std::shared_ptr<MailboxOffice> office_;
  const int rank_;
};

}  // namespace

std::shared_ptr<MailboxOffice> make_mailbox_office(int size, MessageDelays delays) {
  return std::make_shared<MailboxOffice>(size, delays);
}

std::unique_ptr<Messenger> make_mailbox_messenger(std::shared_ptr<MailboxOffice> office, int rank) {
  return std::make_unique<MailboxMessenger>(std::move(office), rank);
}

}  // namespace tandem::comm
