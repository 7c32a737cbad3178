// comm/thread_rendezvous.cpp: the rendezvous of ranks that are threads of one process.
//
// A rank's k-th meeting is every other rank's k-th. A meeting is kept until all ranks have taken
// it; a rank that timed out or died leaves its meeting behind for the others to time out on.
#include "comm/rendezvous.h"
#include <tandem/error.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

namespace tandem::comm {

namespace {

struct Contribution {
  std::string text;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<MailboxOffice> office;
  bool here = false;
};

struct Meeting {
  std::string what;   // of the first to arrive
  std::string other;  // of one that came for something else, if any
  std::vector<Contribution> contributions;
  int arrived = 0;
  int taken = 0;
};

class Hub {
 public:
  explicit Hub(int size) : size_(size) {}

  [[nodiscard]] int size() const { return size_; }

  std::vector<Contribution> meet(int rank,
                                 std::uint64_t number,
                                 const std::string& what,
                                 Contribution mine,
                                 Deadline deadline) {
    std::unique_lock lock(mutex_);
    Meeting& meeting = meetings_[number];  // references into a std::map stay valid
    if (meeting.contributions.empty()) {
      meeting.what = what;
      meeting.contributions.resize(static_cast<std::size_t>(size_));
    } else if (meeting.what != what) {
      meeting.other = what;
    }
    mine.here = true;
    meeting.contributions[static_cast<std::size_t>(rank)] = std::move(mine);
    ++meeting.arrived;
    changed_.notify_all();
    const auto complete = [&] { return meeting.arrived == size_; };
    if (!changed_.wait_until(lock, deadline.at, complete)) {
      throw Timeout(what + ": rank " + std::to_string(rank) + " waited past its deadline for rank" +
                    missing(meeting) + "; did that thread end or take another path?");
    }
    const std::string first = meeting.what;
    const std::string other = meeting.other;
    std::vector<Contribution> all = meeting.contributions;
    if (++meeting.taken == size_) meetings_.erase(number);
    if (!other.empty()) {
      throw Mismatch("ranks meet for different things: '" + first + "' and '" + other +
                     "'; every rank must make the same worlds and engines in the same order");
    }
    return all;
  }

 private:
  [[nodiscard]] std::string missing(const Meeting& meeting) const {
    std::string ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (meeting.contributions[static_cast<std::size_t>(rank)].here) continue;
      ranks += (ranks.empty() ? " " : ", ") + std::to_string(rank);
    }
    return ranks;
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, Meeting> meetings_;
};

class ThreadRendezvous final : public Rendezvous {
 public:
  ThreadRendezvous(std::shared_ptr<Hub> hub, int rank, const ThreadNodes& nodes)
      : hub_(std::move(hub)),
        rank_(rank),
        nodes_(nodes.keys.empty() ? Nodes::consecutive(hub_->size(), nodes.ranks_per_node)
                                  : Nodes(nodes.keys)),
        delays_(nodes.delays) {}

  [[nodiscard]] Group group() const override { return Group{rank_, hub_->size()}; }
  [[nodiscard]] const Nodes& nodes() const override { return nodes_; }

  std::vector<std::string> all_gather(const std::string& what,
                                      const std::string& text,
                                      Deadline deadline) override {
    std::vector<std::string> texts;
    for (Contribution& one : meet(what, Contribution{text, nullptr, nullptr}, deadline)) {
      texts.push_back(std::move(one.text));
    }
    return texts;
  }

  std::vector<std::shared_ptr<Segment>> exchange(const std::string& what,
                                                 std::shared_ptr<Segment> mine,
                                                 Deadline deadline) override {
    std::vector<std::shared_ptr<Segment>> segments;
    for (Contribution& one : meet(what, Contribution{{}, std::move(mine), nullptr}, deadline)) {
      const bool near = nodes_.together(rank_, static_cast<int>(segments.size()));
      segments.push_back(near ? std::move(one.segment) : nullptr);
    }
    return segments;
  }

  std::unique_ptr<Messenger> make_messenger(const std::string& what, Deadline deadline) override {
    std::shared_ptr<MailboxOffice> office;
    if (rank_ == 0) office = make_mailbox_office(hub_->size(), delays_);
    return make_mailbox_messenger(
        meet(what, Contribution{{}, nullptr, std::move(office)}, deadline)[0].office, rank_);
  }

  void close(Deadline deadline) override { meet("closing the world", {}, deadline); }

 private:
  std::vector<Contribution> meet(const std::string& what, Contribution mine, Deadline deadline) {
    return hub_->meet(rank_, next_++, what, std::move(mine), deadline);
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  const Nodes nodes_;
  const MessageDelays delays_;
  std::uint64_t next_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Rendezvous>> make_thread_rendezvous(int size,
                                                                const ThreadNodes& nodes) {
  if (size < 1) {
    throw InvalidArgument("a world of " + std::to_string(size) + " thread ranks: at least 1");
  }
  const auto hub = std::make_shared<Hub>(size);
  std::vector<std::unique_ptr<Rendezvous>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<ThreadRendezvous>(hub, rank, nodes));
  }
  return ranks;
}

}  // namespace tandem::comm
