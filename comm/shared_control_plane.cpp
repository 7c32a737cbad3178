#include "comm/shared_control_plane.h"

#include "comm/collective_try.h"
#include "comm/futex.h"
#include "comm/round_format.h"
#include <tandem/error.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

namespace tandem::comm {

namespace {

constexpr std::size_t kRing = 4;
constexpr std::size_t kSlotBytes = std::size_t{64} << 20;  // of address space, not of memory
constexpr std::size_t kAbortBytes = 4096;

enum AbortState : std::uint32_t { kAlive = 0, kWriting = 1, kAborted = 2 };

struct alignas(64) Head {
  std::atomic<std::uint64_t> posted{0};  // rounds of this segment's rank
  // The world's; in rank 0's segment only.
  alignas(64) Bell bell;
  alignas(64) std::atomic<std::uint32_t> abort_state{kAlive};
  std::uint32_t abort_bytes = 0;
  std::array<char, kAbortBytes> abort_text{};
};

static_assert(sizeof(RoundHead) + kMaxRoundBytes <= kSlotBytes);

constexpr std::size_t kHeadBytes =
    (sizeof(Head) + Segment::kPage - 1) / Segment::kPage * Segment::kPage;
constexpr std::size_t kSegmentBytes = kHeadBytes + kRing * kSlotBytes;

class SharedControlPlane final : public ControlPlane {
 public:
  SharedControlPlane(Group group, std::vector<std::shared_ptr<Segment>> segments)
      : group_(group), segments_(std::move(segments)) {}

  [[nodiscard]] Group group() const override { return group_; }

  void reserve(std::size_t bytes) override { make_room(bytes); }

  RoundId post(const Message& message) override {
    const RoundHead head = RoundHead::of(message);
    write_round(begin_post(head.payload_bytes()), head, message);
    return end_post();
  }

  RoundId post_text(const std::string& text) override {
    const RoundHead head = RoundHead::of(text);
    write_round(begin_post(head.payload_bytes()), head, text);
    return end_post();
  }

  std::optional<Message> test(RoundId round) override {
    if (!complete(round)) return std::nullopt;
    rounds_.take(round);
    compare(round, RoundKind::kMessage);
    Message merged;
    read_round(slot(0, round), merged);
    for (int rank = 1; rank < group_.size; ++rank) {
      read_round(slot(rank, round), scratch_);
      merged.merge(scratch_);
    }
    return merged;
  }

  std::optional<std::vector<std::string>> test_texts(RoundId round) override {
    if (!complete(round)) return std::nullopt;
    rounds_.take(round);
    compare(round, RoundKind::kText);
    std::vector<std::string> texts;
    for (int rank = 0; rank < group_.size; ++rank) texts.push_back(read_text(slot(rank, round)));
    return texts;
  }

  [[nodiscard]] std::vector<int> missing(RoundId round) const override {
    std::vector<int> ranks;
    for (int rank = 0; rank < group_.size; ++rank) {
      if (head(rank).posted.load(std::memory_order_acquire) <= round) ranks.push_back(rank);
    }
    return ranks;
  }

  [[nodiscard]] std::uint32_t change() const override { return world().bell.count(); }

  void wait_for_change(std::uint32_t seen, Clock::time_point until) override {
    Bell& bell = world().bell;
    while (bell.count() == seen && Clock::now() < until) bell.sleep(seen, until);
  }

  void wake() override { world().bell.ring(); }

  void abort(const std::string& text) override {
    Head& shared = world();
    std::uint32_t state = kAlive;
    if (shared.abort_state.compare_exchange_strong(state, kWriting, std::memory_order_acq_rel)) {
      const std::size_t bytes = std::min(text.size(), kAbortBytes);
      std::memcpy(shared.abort_text.data(), text.data(), bytes);
      shared.abort_bytes = static_cast<std::uint32_t>(bytes);
      shared.abort_state.store(kAborted, std::memory_order_release);
    }
    shared.bell.ring();
  }

  [[nodiscard]] std::optional<std::string> aborted() const override {
    const Head& shared = world();
    if (shared.abort_state.load(std::memory_order_acquire) != kAborted) return std::nullopt;
    return std::string(shared.abort_text.data(), shared.abort_bytes);
  }

  [[nodiscard]] std::uint64_t posted_bytes() const override {
    return posted_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t posted_rounds() const override {
    return head(group_.rank).posted.load(std::memory_order_relaxed);
  }

 private:
  [[nodiscard]] Head& head(int rank) const {
    return *reinterpret_cast<Head*>(segments_[static_cast<std::size_t>(rank)]->data());
  }
  [[nodiscard]] Head& world() const { return head(0); }

  static constexpr std::size_t slot_offset(RoundId round) {
    return kHeadBytes + (round % kRing) * kSlotBytes;
  }
  [[nodiscard]] std::byte* slot(int rank, RoundId round) const {
    return segments_[static_cast<std::size_t>(rank)]->data() + slot_offset(round);
  }
  void make_room(std::size_t bytes) {
    check_round_bytes(bytes, group_.rank);
    if (bytes <= room_) return;
    Segment& mine = *segments_[static_cast<std::size_t>(group_.rank)];
    for (RoundId slot = 0; slot < kRing; ++slot) {
      mine.commit(slot_offset(slot), bytes + sizeof(RoundHead));
    }
    room_ = bytes;
  }

  /// The place of head and payload. A text that explains an error may be longer than what was
  /// reserved: the slots are this rank's own, so it makes room alone.
  std::byte* begin_post(std::size_t bytes) {
    rounds_.check_post();
    if (!first_dead_ && aborted()) first_dead_ = rounds_.next();
    make_room(bytes);
    posted_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return slot(group_.rank, rounds_.next());
  }

  RoundId end_post() {
    const RoundId round = rounds_.add();
    head(group_.rank).posted.store(rounds_.next(), std::memory_order_release);
    world().bell.ring();
    return round;
  }

  [[nodiscard]] bool posted_by_all(RoundId round) const {
    for (int rank = 0; rank < group_.size; ++rank) {
      if (head(rank).posted.load(std::memory_order_acquire) <= round) return false;
    }
    return true;
  }

  [[nodiscard]] bool complete(RoundId round) const {
    rounds_.check_open(round);
    if (first_dead_ && round >= *first_dead_) throw WorldBroken(*aborted());
    if (posted_by_all(round)) return true;
    if (const auto text = aborted()) {
      // The rank that aborted may have posted just before: what was agreed is still told (C2).
      if (posted_by_all(round)) return true;
      throw WorldBroken(*text);
    }
    return false;
  }

  void compare(RoundId round, RoundKind kind) const {
    std::vector<RoundHead> heads;
    for (int rank = 0; rank < group_.size; ++rank) heads.push_back(read_head(slot(rank, round)));
    agree_on_heads(heads, kind, round);
  }

  const Group group_;
  std::optional<RoundId> first_dead_;  // posted here when the world was aborted already
  const std::vector<std::shared_ptr<Segment>> segments_;  // by rank
  std::size_t room_ = 0;                                  // bytes a slot can take
  OpenRounds rounds_{group_.rank};
  Message scratch_;
  std::atomic<std::uint64_t> posted_bytes_{0};
};

}  // namespace

std::unique_ptr<ControlPlane> make_shared_control_plane(Rendezvous& rendezvous, Deadline deadline) {
  const Group group = rendezvous.group();
  const std::string what = "making the control plane of the world";
  std::shared_ptr<Segment> mine;
  try_on_all_ranks(rendezvous, what, {}, deadline, [&] {
    mine = Segment::create("control, rank " + std::to_string(group.rank), kSegmentBytes);
    mine->commit(0, kHeadBytes);
    new (mine->data()) Head();
  });
  auto plane = std::make_unique<SharedControlPlane>(
      group, rendezvous.exchange(what, std::move(mine), deadline));
  try_on_all_ranks(rendezvous, what, {}, deadline, [&] { plane->reserve(Segment::kPage / 2); });
  return plane;
}

}  // namespace tandem::comm
