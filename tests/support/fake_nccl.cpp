#include "tests/support/fake_nccl.h"

#include "kernels/simulated_device.h"
#include <tandem/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

namespace tandem::test_support {

namespace {

using comm::Deadline;
using comm::Group;
using kernels::DeviceError;

/// One call of a group.
struct Call {
  enum class Kind : std::uint8_t { kSend, kReceive, kAllGather, kBroadcast };
  Kind kind = Kind::kSend;
  const std::byte* from = nullptr;  // of what leaves this rank
  std::byte* to = nullptr;          // of what arrives
  std::size_t bytes = 0;
  int peer = 0;  // or root
  std::shared_ptr<std::vector<std::byte>> kept =
      nullptr;                 // of a send that does not wait for its receive
  std::string said;            // what must be equal on both sides, or on all
  std::size_t collective = 0;  // its number, of collectives
};

/// A group whose turn has come on its stream, or will.
struct Work {
  int rank = 0;
  std::vector<Call> calls;
  std::size_t open = 0;  // calls that are not done
  bool hangs = false;
};

/// A call that waits for its peers.
struct Waiting {
  std::shared_ptr<Work> work;
  Call call;
};

struct Collective {
  std::string said;
  int said_by = 0;
  bool agreed = true;
  std::map<int, Waiting> arrived;
};

}  // namespace

struct FakeNccl::State {
  struct Rank {
    Faults faults;
    std::string async_error;
    std::int64_t calls = 0;
    std::int64_t calls_after_abort = 0;
    std::int64_t groups = 0;
    std::int64_t all_gathers = 0;
    std::int64_t broadcasts = 0;
    std::int64_t aborts = 0;
    std::int64_t cut_off = 0;
    std::vector<std::uintptr_t> streams;
  };
  /// What the ranks of one communicator share.
  struct Wire {
    std::vector<bool> joined;
    std::vector<bool> aborted;
    std::vector<std::int64_t> under_way;  // groups given to streams and not over
    std::map<std::pair<int, int>, std::deque<Waiting>> sends;     // by (from, to)
    std::map<std::pair<int, int>, std::deque<Waiting>> receives;  // by (from, to)
    std::vector<Collective> collectives;
    [[nodiscard]] bool all_joined() const {
      return std::find(joined.begin(), joined.end(), false) == joined.end();
    }
  };

  explicit State(int size) : ranks(static_cast<std::size_t>(size)) {}

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<Rank> ranks;
  std::map<std::string, std::shared_ptr<Wire>> wires;
  std::vector<std::string> problems;
  int ids = 0;
  std::uint64_t sends = 0;

  Rank& of(int rank) { return ranks.at(static_cast<std::size_t>(rank)); }

  // The following are called with the lock held.

  void problem(int rank, const std::string& text) {
    problems.push_back("rank " + std::to_string(rank) + ": " + text);
  }

  static void done(const Waiting& waiting) { --waiting.work->open; }

  void match_transfers(Wire& wire, const std::pair<int, int>& pair) {
    std::deque<Waiting>& sends = wire.sends[pair];
    std::deque<Waiting>& receives = wire.receives[pair];
    while (!sends.empty() && !receives.empty()) {
      const Waiting send = sends.front();
      const Waiting receive = receives.front();
      sends.pop_front();
      receives.pop_front();
      if (send.call.said != receive.call.said) {
        problem(pair.second, "receives " + receive.call.said + " from rank " +
                                 std::to_string(pair.first) + ", which sends " + send.call.said);
      } else {
        std::memcpy(receive.call.to, send.call.from, send.call.bytes);
      }
      if (send.call.kept == nullptr) done(send);
      done(receive);
    }
  }

  void join_collective(Wire& wire, const Waiting& waiting) {
    Collective& collective = wire.collectives[waiting.call.collective];
    collective.arrived.emplace(waiting.work->rank, waiting);
    if (collective.arrived.size() < wire.joined.size()) return;
    for (const auto& [rank, to] : collective.arrived) {
      for (const auto& [peer, from] : collective.arrived) {
        if (!collective.agreed || peer == rank) continue;
        const bool gather = to.call.kind == Call::Kind::kAllGather;
        if (!gather && peer != to.call.peer) continue;
        std::byte* const place =
            to.call.to + (gather ? static_cast<std::size_t>(peer) * to.call.bytes : 0);
        std::memcpy(place, from.call.from, to.call.bytes);
      }
    }
    for (const auto& [rank, waits] : collective.arrived) done(waits);
    collective.arrived.clear();
  }

  /// Every other send is done for its rank when it has been buffered.
  void send(Wire& wire, Waiting waiting) {
    Call& call = waiting.call;
    if (++sends % 2 == 0) {
      call.kept = std::make_shared<std::vector<std::byte>>(call.from, call.from + call.bytes);
      call.from = call.kept->data();
      done(waiting);
    }
    const std::pair<int, int> pair{waiting.work->rank, call.peer};
    wire.sends[pair].push_back(std::move(waiting));
    match_transfers(wire, pair);
  }

  [[nodiscard]] static std::int64_t not_received(const Wire& wire, int rank) {
    std::int64_t count = 0;
    for (const auto& [pair, queue] : wire.sends) {
      if (pair.first == rank) count += static_cast<std::int64_t>(queue.size());
    }
    return count;
  }

  void leave(Wire& wire, int rank) {
    const auto mine = [&](const Waiting& waiting) { return waiting.work->rank == rank; };
    for (auto* const queues : {&wire.sends, &wire.receives}) {
      for (auto& [pair, queue] : *queues) {
        queue.erase(std::remove_if(queue.begin(), queue.end(), mine), queue.end());
      }
    }
    for (Collective& collective : wire.collectives) collective.arrived.erase(rank);
  }
};

namespace {

/// What the stream does when the group's turn has come.
void perform(FakeNccl::State& state,
             FakeNccl::State::Wire& wire,
             const std::shared_ptr<Work>& work) {
  std::unique_lock lock(state.mutex);
  const auto aborted = [&] { return wire.aborted[static_cast<std::size_t>(work->rank)]; };
  if (!work->hangs && !aborted()) {
    for (const Call& call : work->calls) {
      const Waiting waiting{work, call};
      switch (call.kind) {
        case Call::Kind::kSend:
          state.send(wire, waiting);
          break;
        case Call::Kind::kReceive:
          wire.receives[{call.peer, work->rank}].push_back(waiting);
          state.match_transfers(wire, {call.peer, work->rank});
          break;
        default:
          state.join_collective(wire, waiting);
      }
    }
    state.changed.notify_all();
  }
  state.changed.wait(lock, [&] { return aborted() || work->open == 0; });
  --wire.under_way[static_cast<std::size_t>(work->rank)];
}

class Communicator final : public comm::NcclCommunicator {
 public:
  Communicator(std::shared_ptr<FakeNccl::State> state,
               std::shared_ptr<FakeNccl::State::Wire> wire,
               Group group)
      : state_(std::move(state)), wire_(std::move(wire)), group_(group) {}
  ~Communicator() override {
    {
      const std::lock_guard lock(state_->mutex);
      if (!aborted()) {
        state_->of(group_.rank).cut_off +=
            under_way() + FakeNccl::State::not_received(*wire_, group_.rank);
      }
    }
    end();
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  Communicator(Communicator&&) = delete;
  Communicator& operator=(Communicator&&) = delete;

  void group_start() override {
    const std::lock_guard lock(state_->mutex);
    enter("group_start");
    if (open_) state_->problem(group_.rank, "a group inside a group");
    open_ = true;
    calls_.clear();
    stream_ = nullptr;
  }

  void send(const std::byte* data,
            std::size_t numel,
            kernels::Dtype dtype,
            int to,
            kernels::Stream& stream) override {
    const std::lock_guard lock(state_->mutex);
    enter("send");
    add({.kind = Call::Kind::kSend,
         .from = data,
         .bytes = numel * kernels::bytes_of(dtype),
         .peer = to,
         .said = std::to_string(numel) + " " + kernels::name_of(dtype)},
        stream);
    if (to == group_.rank) state_->problem(group_.rank, "sends to itself");
  }

  void receive(std::byte* data,
               std::size_t numel,
               kernels::Dtype dtype,
               int from,
               kernels::Stream& stream) override {
    const std::lock_guard lock(state_->mutex);
    enter("receive");
    const std::size_t bytes = numel * kernels::bytes_of(dtype);
    for (const Call& call : calls_) {
      if (call.kind == Call::Kind::kReceive && data < call.to + call.bytes &&
          call.to < data + bytes) {
        state_->problem(group_.rank, "receives of a group overlap");
      }
    }
    add({.kind = Call::Kind::kReceive,
         .to = data,
         .bytes = bytes,
         .peer = from,
         .said = std::to_string(numel) + " " + kernels::name_of(dtype)},
        stream);
    if (from == group_.rank) state_->problem(group_.rank, "receives from itself");
  }

  void all_gather(const std::byte* mine,
                  std::byte* all,
                  std::size_t bytes,
                  kernels::Stream& stream) override {
    const std::lock_guard lock(state_->mutex);
    enter("all_gather");
    ++state_->of(group_.rank).all_gathers;
    if (mine != all + static_cast<std::size_t>(group_.rank) * bytes) {
      state_->problem(group_.rank, "an all_gather that is not in place");
    }
    add_collective({.kind = Call::Kind::kAllGather,
                    .from = mine,
                    .to = all,
                    .bytes = bytes,
                    .said = "all_gather of " + std::to_string(bytes)},
                   stream);
  }

  void broadcast(std::byte* data, std::size_t bytes, int root, kernels::Stream& stream) override {
    const std::lock_guard lock(state_->mutex);
    enter("broadcast");
    ++state_->of(group_.rank).broadcasts;
    add_collective(
        {.kind = Call::Kind::kBroadcast,
         .from = data,
         .to = data,
         .bytes = bytes,
         .peer = root,
         .said = "broadcast of " + std::to_string(bytes) + " from " + std::to_string(root)},
        stream);
  }

  void group_end(Deadline deadline) override {
    std::unique_lock lock(state_->mutex);
    enter("group_end");
    if (!open_) state_->problem(group_.rank, "group_end without a group");
    open_ = false;
    FakeNccl::State::Rank& rank = state_->of(group_.rank);
    const std::int64_t number = rank.groups++;
    if (number == rank.faults.untaken_group) {
      if (state_->changed.wait_until(lock, deadline.at, [&] { return aborted(); })) refuse();
      throw Timeout("fake NCCL: group_end is in progress at its deadline");
    }
    if (calls_.empty()) return;
    auto work = std::make_shared<Work>();
    work->rank = group_.rank;
    work->calls = std::move(calls_);
    work->open = work->calls.size();
    work->hangs = number == rank.faults.hanging_group;
    ++under_way();
    kernels::Stream& stream = *stream_;
    lock.unlock();
    kernels::give_simulated_work(
        stream, [state = state_, wire = wire_, work] { perform(*state, *wire, work); });
  }

  void check() override {
    const std::lock_guard lock(state_->mutex);
    if (aborted()) refuse();
    const std::string& error = state_->of(group_.rank).async_error;
    if (!error.empty()) throw DeviceError(error);
  }

  void abort() noexcept override {
    {
      const std::lock_guard lock(state_->mutex);
      ++state_->of(group_.rank).aborts;
    }
    end();
  }

 private:
  void end() {
    {
      const std::lock_guard lock(state_->mutex);
      wire_->aborted[static_cast<std::size_t>(group_.rank)] = true;
      state_->leave(*wire_, group_.rank);
    }
    state_->changed.notify_all();
  }

  [[nodiscard]] std::int64_t& under_way() const {
    return wire_->under_way[static_cast<std::size_t>(group_.rank)];
  }
  [[nodiscard]] bool aborted() const {
    return wire_->aborted[static_cast<std::size_t>(group_.rank)];
  }
  [[noreturn]] static void refuse() {
    throw DeviceError("fake NCCL: the communicator was aborted");
  }

  void enter(const char* name) {
    FakeNccl::State::Rank& rank = state_->of(group_.rank);
    if (aborted()) {
      ++rank.calls_after_abort;
      refuse();
    }
    if (rank.calls++ == rank.faults.failing_call) {
      open_ = false;
      throw DeviceError(std::string("fake NCCL: ") + name + " failed");
    }
  }

  void add(Call call, kernels::Stream& stream) {
    FakeNccl::State::Rank& rank = state_->of(group_.rank);
    if (!open_) state_->problem(group_.rank, "a call outside a group");
    if (stream_ != nullptr && stream_->id() != stream.id()) {
      state_->problem(group_.rank, "a group on two streams");
    }
    stream_ = &stream;
    if (std::find(rank.streams.begin(), rank.streams.end(), stream.id()) == rank.streams.end()) {
      rank.streams.push_back(stream.id());
    }
    if (call.bytes == 0 || (call.from == nullptr && call.to == nullptr)) {
      state_->problem(group_.rank, "a call without data");
    }
    calls_.push_back(std::move(call));
  }

  void add_collective(Call call, kernels::Stream& stream) {
    call.collective = collectives_++;
    if (call.collective == wire_->collectives.size()) {
      wire_->collectives.push_back({call.said, group_.rank, true, {}});
    }
    Collective& collective = wire_->collectives[call.collective];
    if (collective.said != call.said) {
      collective.agreed = false;
      state_->problem(group_.rank, call.said + " where rank " + std::to_string(collective.said_by) +
                                       " has " + collective.said);
    }
    add(std::move(call), stream);
  }

  const std::shared_ptr<FakeNccl::State> state_;
  const std::shared_ptr<FakeNccl::State::Wire> wire_;
  const Group group_;
  bool open_ = false;
  std::vector<Call> calls_;  // of the open group
  kernels::Stream* stream_ = nullptr;
  std::size_t collectives_ = 0;
};

class Library final : public comm::Nccl {
 public:
  Library(std::shared_ptr<FakeNccl::State> state, int rank)
      : state_(std::move(state)), rank_(rank) {}

  [[nodiscard]] std::string unique_id() override {
    const std::lock_guard lock(state_->mutex);
    // With a zero byte, as NCCL's have.
    return std::string("fake\0", 5) + std::to_string(state_->ids++);
  }

  [[nodiscard]] std::unique_ptr<comm::NcclCommunicator> join(const std::string& unique_id,
                                                             Group group,
                                                             Deadline deadline) override {
    std::unique_lock lock(state_->mutex);
    if (group.rank != rank_) state_->problem(rank_, "joins as another rank");
    if (state_->of(rank_).faults.join) throw DeviceError("fake NCCL: joining failed");
    auto& wire = state_->wires[unique_id];
    if (wire == nullptr) {
      wire = std::make_shared<FakeNccl::State::Wire>();
      wire->joined.assign(static_cast<std::size_t>(group.size), false);
      wire->aborted.assign(static_cast<std::size_t>(group.size), false);
      wire->under_way.assign(static_cast<std::size_t>(group.size), 0);
    }
    const auto mine = wire;
    if (mine->joined[static_cast<std::size_t>(rank_)]) state_->problem(rank_, "joins twice");
    mine->joined[static_cast<std::size_t>(rank_)] = true;
    state_->changed.notify_all();
    if (!state_->changed.wait_until(lock, deadline.at, [&] { return mine->all_joined(); })) {
      throw Timeout("fake NCCL: not all ranks have joined");
    }
    return std::make_unique<Communicator>(state_, mine, group);
  }

 private:
  const std::shared_ptr<FakeNccl::State> state_;
  const int rank_;
};

}  // namespace

FakeNccl::FakeNccl(int ranks) : state_(std::make_shared<State>(ranks)) {}

FakeNccl::~FakeNccl() {
  for (const std::string& problem : take_problems()) ADD_FAILURE() << "fake NCCL: " << problem;
}

std::unique_ptr<comm::Nccl> FakeNccl::library(int rank) {
  return std::make_unique<Library>(state_, rank);
}

void FakeNccl::set_faults(int rank, const Faults& faults) {
  const std::lock_guard lock(state_->mutex);
  state_->of(rank).faults = faults;
}

void FakeNccl::report_async_error(int rank, const std::string& text) {
  const std::lock_guard lock(state_->mutex);
  state_->of(rank).async_error = text;
}

std::int64_t FakeNccl::calls(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).calls;
}

std::int64_t FakeNccl::calls_after_abort(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).calls_after_abort;
}

std::int64_t FakeNccl::groups(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).groups;
}

std::int64_t FakeNccl::all_gathers(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).all_gathers;
}

std::int64_t FakeNccl::broadcasts(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).broadcasts;
}

std::int64_t FakeNccl::aborts(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).aborts;
}

std::int64_t FakeNccl::cut_off(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).cut_off;
}

std::int64_t FakeNccl::groups_under_way(int rank) const {
  const std::lock_guard lock(state_->mutex);
  std::int64_t groups = 0;
  for (const auto& [id, wire] : state_->wires) {
    groups += wire->under_way.at(static_cast<std::size_t>(rank));
  }
  return groups;
}

std::vector<std::uintptr_t> FakeNccl::streams(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->of(rank).streams;
}

std::vector<std::string> FakeNccl::take_problems() {
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->problems, {});
}

}  // namespace tandem::test_support
