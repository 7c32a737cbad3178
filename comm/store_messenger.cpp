#include "comm/store_messenger.h"

#include <tandem/error.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace tandem::comm {

namespace {

constexpr std::size_t kNoticeBytes = 4096;  // of a chunk that travels in its notice
constexpr std::chrono::seconds kDrain{1};

/// The sleep before the next look at the store.
std::chrono::microseconds pause_after(Clock::duration quiet) {
  using namespace std::chrono_literals;
  if (quiet < 10ms) return 50us;
  if (quiet < 100ms) return 200us;
  return quiet < 1s ? 1000us : 5000us;
}

/// What is said of a chunk: a line of words, then the chunk itself unless it is stored elsewhere.
struct Notice {
  int space = 0;
  int from = 0;
  std::uint64_t number = 0;  // of the chunk, per space and pair of ranks
  int tag = 0;
  std::size_t bytes = 0;  // of the whole message
  bool stored = false;
  std::string chunk;

  [[nodiscard]] std::string text() const {
    std::ostringstream line;
    line << space << ' ' << from << ' ' << number << ' ' << tag << ' ' << bytes << ' '
         << (stored ? 1 : 0) << '\n';
    return line.str() + chunk;
  }

  static Notice parse(const std::string& text) {
    const std::size_t end = text.find('\n');
    std::istringstream words(text.substr(0, end));
    Notice notice;
    if (end == std::string::npos || !(words >> notice.space >> notice.from >> notice.number >>
                                      notice.tag >> notice.bytes >> notice.stored)) {
      throw SystemError("a message in the store cannot be read: '" + text.substr(0, 80) +
                        "'; do all ranks run the same version?");
    }
    notice.chunk = text.substr(end + 1);
    return notice;
  }
};

/// A message on its way into the store. Under the mail's mutex, but for what its comment excepts.
struct Outgoing {
  int tag = 0;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> keep;
  std::size_t handed = 0;  // bytes in the store; the thread's alone
  bool done = false;
};

/// A message of which the first chunk is here. Under the mail's mutex; while `started` and not
/// `done`, `into` and `fetched` are the thread's alone.
struct Incoming {
  int from = 0;
  int tag = 0;
  std::size_t bytes = 0;
  std::string first;
  std::byte* into = nullptr;
  std::shared_ptr<const void> keep;
  std::size_t fetched = 0;
  bool started = false;  // receive() was called
  bool done = false;
};

using Line = std::pair<int, int>;  // space and the other rank

}  // namespace

class StoreMail {
 public:
  StoreMail(std::shared_ptr<Store> store, std::string prefix, Group group, std::size_t chunk_bytes)
      : store_(std::move(store)),
        prefix_(std::move(prefix)),
        group_(group),
        chunk_bytes_(chunk_bytes),
        thread_([this] { run(); }) {}

  ~StoreMail() {
    {
      const std::lock_guard lock(mutex_);
      stop_at_ = Clock::now() + kDrain;
      wanted_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  StoreMail(const StoreMail&) = delete;
  StoreMail& operator=(const StoreMail&) = delete;
  StoreMail(StoreMail&&) = delete;
  StoreMail& operator=(StoreMail&&) = delete;

  void send(int space, int to, const std::shared_ptr<Outgoing>& message) {
    {
      const std::lock_guard lock(mutex_);
      check();
      out_[{space, to}].queue.push_back(message);
      wanted_ = true;
    }
    changed_.notify_all();
  }

  std::shared_ptr<Incoming> take(int space, int from) {
    const std::lock_guard lock(mutex_);
    check();
    for (int rank = 0; rank < group_.size; ++rank) {
      if (from != kAnyRank && rank != from) continue;
      const auto line = in_.find({space, rank});
      if (line == in_.end() || !line->second.unprobed) continue;
      wanted_ = true;  // room for the next one
      changed_.notify_all();
      return std::exchange(line->second.unprobed, nullptr);
    }
    return nullptr;
  }

  void start(Incoming& message, std::byte* into, std::shared_ptr<const void> keep) {
    const std::lock_guard lock(mutex_);
    if (!message.first.empty()) std::memcpy(into, message.first.data(), message.first.size());
    message.into = into;
    message.keep = std::move(keep);
    message.fetched = message.first.size();
    message.first = std::string();
    message.started = true;
    message.done = message.fetched == message.bytes;
    if (message.done) return;
    wanted_ = true;
    changed_.notify_all();
  }

  template <class Message>
  bool done(const Message& message) {
    const std::lock_guard lock(mutex_);
    if (!message.done) check();
    return message.done;
  }

  /// What comes for it is dropped from now on.
  void close(int space) {
    const std::lock_guard lock(mutex_);
    closed_.insert(space);
    std::erase_if(in_, [&](const auto& line) { return line.first.first == space; });
  }

  bool flush(Deadline deadline) {
    std::unique_lock lock(mutex_);
    while (!drained()) {
      check();
      if (deadline.passed()) return false;
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  struct Out {
    std::deque<std::shared_ptr<Outgoing>> queue;
    std::uint64_t sent = 0;   // chunks
    std::uint64_t taken = 0;  // of those, by the receiver, when last asked
  };
  struct In {
    std::map<std::uint64_t, Notice> held;  // by number; not needed yet, or out of order
    std::uint64_t next = 0;
    std::uint64_t told = 0;              // chunks that the sender knows to be taken
    std::shared_ptr<Incoming> unprobed;  // found next
    std::shared_ptr<Incoming> current;   // has chunks to come
    [[nodiscard]] bool wants() const { return current ? current->started : !unprobed; }
  };
  using Lock = std::unique_lock<std::mutex>;

  void check() const {
    if (failure_) throw SystemError(*failure_);
  }

  [[nodiscard]] bool drained() const {
    return std::all_of(out_.begin(), out_.end(),
                       [](const auto& line) { return line.second.queue.empty(); });
  }

  [[nodiscard]] std::string key(const char* kind, int space, int from, int to) const {
    return prefix_ + kind + "/" + std::to_string(space) + "/" + std::to_string(from) + "/" +
           std::to_string(to);
  }
  [[nodiscard]] std::string inbox(int rank) const {
    return prefix_ + "inbox/" + std::to_string(rank);
  }

  void run() {
    Lock lock(mutex_);
    auto moved_at = Clock::now();
    try {
      while (!stop_at_ || (!drained() && Clock::now() < *stop_at_)) {
        if (std::exchange(wanted_, false)) moved_at = Clock::now();
        bool moved = hand_over(lock);
        if (!stop_at_) {
          moved = look_into_inbox(lock) || moved;
          moved = fetch(lock) || moved;
        }
        lock.unlock();
        released_.clear();
        lock.lock();
        if (moved) {
          moved_at = Clock::now();
          continue;
        }
        changed_.wait_for(lock, pause_after(Clock::now() - moved_at), [&] { return wanted_; });
      }
    } catch (const std::exception& error) {
      if (!lock.owns_lock()) lock.lock();
      failure_ = error.what();
    }
  }

  // All below by the thread; the lock is given up around every call of the store.

  /// One chunk of each line, so that a long message holds up no short one.
  bool hand_over(Lock& lock) {
    std::vector<Line> lines;
    for (auto line = out_.begin(); line != out_.end();) {
      if (!line->second.queue.empty()) lines.push_back(line->first);
      const bool over = line->second.queue.empty() && closed_.count(line->first.first) != 0;
      line = over ? out_.erase(line) : std::next(line);
    }
    bool moved = false;
    for (const Line& line : lines) {
      Out& out = out_[line];  // stays: only this function erases
      const std::shared_ptr<Outgoing> message = out.queue.front();
      lock.unlock();
      const bool handed = may_send(line, out) && hand_over(line, out, *message);
      lock.lock();
      if (!handed) continue;
      moved = true;
      if (message->handed < message->bytes) continue;
      message->done = true;
      released_.push_back(std::move(message->keep));
      out.queue.pop_front();
    }
    return moved;
  }

  bool may_send(const Line& line, Out& out) {
    if (out.sent - out.taken < kStoreWindow) return true;
    out.taken = static_cast<std::uint64_t>(
        store_->add(key("taken", line.first, group_.rank, line.second), 0));
    return out.sent - out.taken < kStoreWindow;
  }

  bool hand_over(const Line& line, Out& out, Outgoing& message) {
    const auto [space, to] = line;
    const std::size_t bytes = std::min(chunk_bytes_, message.bytes - message.handed);
    Notice notice{space,         group_.rank,          out.sent, message.tag,
                  message.bytes, bytes > kNoticeBytes, {}};
    std::string chunk(reinterpret_cast<const char*>(message.data + message.handed), bytes);
    if (notice.stored) {
      store_->set(key("chunk", space, group_.rank, to) + "/" + std::to_string(out.sent), chunk);
    } else {
      notice.chunk = std::move(chunk);
    }
    const std::int64_t number = store_->add(inbox(to), 1);
    store_->set(inbox(to) + "/" + std::to_string(number), notice.text());
    ++out.sent;
    message.handed += bytes;
    return true;
  }

  bool look_into_inbox(Lock& lock) {
    lock.unlock();
    const std::int64_t last = store_->add(inbox(group_.rank), 0);
    for (; last_numbered_ < last; ++last_numbered_) expected_.push_back(last_numbered_ + 1);
    std::vector<Notice> notices;
    // A number that was taken and has no notice yet is asked for again, and holds up nobody else:
    // its sender may have died in between. So notices of one rank may be seen out of order.
    std::erase_if(expected_, [&](std::int64_t number) {
      const std::string place = inbox(group_.rank) + "/" + std::to_string(number);
      const auto text = store_->find(place);
      if (!text) return false;
      store_->erase(place);
      notices.push_back(Notice::parse(*text));
      return true;
    });
    lock.lock();
    for (Notice& notice : notices) {
      if (closed_.count(notice.space) != 0) continue;
      in_[{notice.space, notice.from}].held[notice.number] = std::move(notice);
    }
    return !notices.empty();
  }

  /// Takes of each line one chunk that is wanted.
  bool fetch(Lock& lock) {
    std::vector<Line> lines;
    for (const auto& [line, in] : in_) {
      if (in.wants() && in.held.count(in.next) != 0) lines.push_back(line);
    }
    for (const Line& line : lines) {
      const auto found = in_.find(line);
      if (found == in_.end()) continue;  // closed meanwhile
      Notice notice = std::move(found->second.held.extract(found->second.next).mapped());
      const std::shared_ptr<Incoming> current = found->second.current;
      const std::uint64_t untold = found->second.next + 1 - found->second.told;
      lock.unlock();
      std::string chunk = take_chunk(line, notice);
      if (current) std::memcpy(current->into + current->fetched, chunk.data(), chunk.size());
      if (untold >= kStoreWindow / 2) {
        store_->add(key("taken", line.first, line.second, group_.rank),
                    static_cast<std::int64_t>(untold));
      }
      lock.lock();
      if (current) current->fetched += chunk.size();
      if (current && current->fetched == current->bytes) {
        current->done = true;
        released_.push_back(std::move(current->keep));
      }
      const auto again = in_.find(line);
      if (again == in_.end()) continue;
      In& in = again->second;
      ++in.next;
      if (untold >= kStoreWindow / 2) in.told = in.next;
      if (current) {
        if (current->done) in.current = nullptr;
        continue;
      }
      in.unprobed = std::make_shared<Incoming>();
      in.unprobed->from = notice.from;
      in.unprobed->tag = notice.tag;
      in.unprobed->bytes = notice.bytes;
      if (chunk.size() < notice.bytes) in.current = in.unprobed;
      in.unprobed->first = std::move(chunk);
    }
    return !lines.empty();
  }

  std::string take_chunk(const Line& line, Notice& notice) {
    if (!notice.stored) return std::move(notice.chunk);
    const std::string place =
        key("chunk", line.first, line.second, group_.rank) + "/" + std::to_string(notice.number);
    auto chunk = store_->find(place);
    if (!chunk) {
      throw SystemError("the store has lost a part of a message of rank " +
                        std::to_string(line.second) + " to rank " + std::to_string(group_.rank) +
                        " ('" + place + "'); does something else erase keys of this store?");
    }
    store_->erase(place);
    return std::move(*chunk);
  }

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const Group group_;
  const std::size_t chunk_bytes_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool wanted_ = false;  // the thread has something new to look at
  std::optional<Clock::time_point> stop_at_;
  std::optional<std::string> failure_;
  std::map<Line, Out> out_;
  std::map<Line, In> in_;
  std::set<int> closed_;

  // The thread's alone.
  std::int64_t last_numbered_ = 0;      // of this rank's inbox
  std::vector<std::int64_t> expected_;  // numbers whose notices were not there yet, ascending
  std::vector<std::shared_ptr<const void>> released_;  // to be let go without the lock

  std::thread thread_;  // last: it uses all of the above
};

namespace {

template <class Message>
class MailTransfer final : public Transfer {
 public:
  MailTransfer(std::shared_ptr<StoreMail> mail, std::shared_ptr<Message> message)
      : mail_(std::move(mail)), message_(std::move(message)) {}
  [[nodiscard]] bool done() override { return mail_->done(*message_); }

 private:
  const std::shared_ptr<StoreMail> mail_;
  const std::shared_ptr<Message> message_;  // if abandoned, the mail holds it as long as it needs
};

class MailArrival final : public Arrival {
 public:
  MailArrival(std::shared_ptr<StoreMail> mail, std::shared_ptr<Incoming> message)
      : Arrival(message->from, message->tag, message->bytes),
        mail_(std::move(mail)),
        message_(std::move(message)) {}

  [[nodiscard]] std::unique_ptr<Transfer> receive(std::byte* into,
                                                  std::shared_ptr<const void> keep) override {
    mail_->start(*message_, into, std::move(keep));
    return std::make_unique<MailTransfer<Incoming>>(mail_, message_);
  }

 private:
  const std::shared_ptr<StoreMail> mail_;
  const std::shared_ptr<Incoming> message_;
};

class StoreMessenger final : public Messenger {
 public:
  StoreMessenger(std::shared_ptr<StoreMail> mail, int space)
      : mail_(std::move(mail)), space_(space) {}
  ~StoreMessenger() override { mail_->close(space_); }
  StoreMessenger(const StoreMessenger&) = delete;
  StoreMessenger& operator=(const StoreMessenger&) = delete;
  StoreMessenger(StoreMessenger&&) = delete;
  StoreMessenger& operator=(StoreMessenger&&) = delete;

  [[nodiscard]] std::unique_ptr<Transfer> send(int to,
                                               int tag,
                                               const std::byte* data,
                                               std::size_t bytes,
                                               std::shared_ptr<const void> keep) override {
    auto message = std::make_shared<Outgoing>();
    message->tag = tag;
    message->data = data;
    message->bytes = bytes;
    message->keep = std::move(keep);
    mail_->send(space_, to, message);
    return std::make_unique<MailTransfer<Outgoing>>(mail_, std::move(message));
  }

  [[nodiscard]] std::unique_ptr<Arrival> probe(int from) override {
    auto message = mail_->take(space_, from);
    return message ? std::make_unique<MailArrival>(mail_, std::move(message)) : nullptr;
  }

 private:
  const std::shared_ptr<StoreMail> mail_;
  const int space_;
};

}  // namespace

std::shared_ptr<StoreMail> make_store_mail(std::shared_ptr<Store> store,
                                           const std::string& prefix,
                                           Group group,
                                           std::size_t chunk_bytes) {
  return std::make_shared<StoreMail>(std::move(store), prefix, group, chunk_bytes);
}

std::unique_ptr<Messenger> make_store_messenger(std::shared_ptr<StoreMail> mail, int space) {
  return std::make_unique<StoreMessenger>(std::move(mail), space);
}

bool flush(StoreMail& mail, Deadline deadline) { return mail.flush(deadline); }

}  // namespace tandem::comm
