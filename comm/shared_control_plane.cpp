#include "comm/shared_control_plane.h"

#include "comm/collective_try.h"
#include "comm/futex.h"
#include "comm/memory_limit.h"
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

enum class Kind : std::uint64_t { kMessage = 0, kText = 1 };

/// What a slot begins with; the sections or the text follow without gaps.
struct SlotHead {
  Kind kind = Kind::kMessage;
  std::array<std::uint64_t, 4> sizes{};  // words of ors, mins, maxs, sums; or {bytes, 0, 0, 0}

  bool operator==(const SlotHead&) const = default;
};

constexpr std::size_t kHeadBytes =
    (sizeof(Head) + Segment::kPage - 1) / Segment::kPage * Segment::kPage;
constexpr std::size_t kSegmentBytes = kHeadBytes + kRing * kSlotBytes;

std::string describe(const SlotHead& slot) {
  if (slot.kind == Kind::kText) return "a text";
  return "a message of " + std::to_string(slot.sizes[0]) + " ors, " +
         std::to_string(slot.sizes[1]) + " mins, " + std::to_string(slot.sizes[2]) + " maxs, " +
         std::to_string(slot.sizes[3]) + " sums";
}

template <typename T>
std::byte* write_words(std::byte* to, const std::vector<T>& words) {
  if (!words.empty()) std::memcpy(to, words.data(), words.size() * sizeof(T));
  return to + words.size() * sizeof(T);
}

template <typename T>
const std::byte* read_words(const std::byte* from, std::uint64_t count, std::vector<T>& words) {
  words.resize(count);
  if (count != 0) std::memcpy(words.data(), from, count * sizeof(T));
  return from + count * sizeof(T);
}

class SharedControlPlane final : public ControlPlane {
 public:
  SharedControlPlane(Group group, std::vector<std::shared_ptr<Segment>> segments)
      : group_(group), segments_(std::move(segments)) {}

  [[nodiscard]] Group group() const override { return group_; }

  void reserve(std::size_t bytes) override { make_room(bytes); }

  RoundId post(const Message& message) override {
    const SlotHead slot{
        Kind::kMessage,
        {message.ors.size(), message.mins.size(), message.maxs.size(), message.sums.size()}};
    const std::size_t words =
        message.ors.size() + message.mins.size() + message.maxs.size() + message.sums.size();
    std::byte* to = begin_post(slot, words * sizeof(std::uint64_t));
    to = write_words(to, message.ors);
    to = write_words(to, message.mins);
    to = write_words(to, message.maxs);
    write_words(to, message.sums);
    return end_post();
  }

  RoundId post_text(const std::string& text) override {
    std::byte* const to = begin_post(SlotHead{Kind::kText, {text.size(), 0, 0, 0}}, text.size());
    if (!text.empty()) std::memcpy(to, text.data(), text.size());
    return end_post();
  }

  std::optional<Message> test(RoundId round) override {
    if (!complete(round)) return std::nullopt;
    take(round);
    agree_on_heads(round, Kind::kMessage);
    Message merged;
    read_message(0, round, merged);
    for (int rank = 1; rank < group_.size; ++rank) {
      read_message(rank, round, scratch_);
      merged.merge(scratch_);
    }
    return merged;
  }

  std::optional<std::vector<std::string>> test_texts(RoundId round) override {
    if (!complete(round)) return std::nullopt;
    take(round);
    agree_on_heads(round, Kind::kText);
    std::vector<std::string> texts;
    for (int rank = 0; rank < group_.size; ++rank) {
      const SlotHead head = slot_head(rank, round);
      texts.emplace_back(reinterpret_cast<const char*>(payload(rank, round)), head.sizes[0]);
    }
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
  [[nodiscard]] SlotHead slot_head(int rank, RoundId round) const {
    SlotHead head;
    std::memcpy(&head, slot(rank, round), sizeof(head));
    return head;
  }
  [[nodiscard]] const std::byte* payload(int rank, RoundId round) const {
    return slot(rank, round) + sizeof(SlotHead);
  }

  void make_room(std::size_t bytes) {
    if (bytes > kSlotBytes - sizeof(SlotHead)) {
      throw InvalidArgument("control plane: a message of " + describe_bytes(bytes) + " on rank " +
                            std::to_string(group_.rank) + "; at most " +
                            describe_bytes(kSlotBytes - sizeof(SlotHead)) +
                            " fit: use fewer or smaller engines in one world");
    }
    if (bytes <= room_) return;
    Segment& mine = *segments_[static_cast<std::size_t>(group_.rank)];
    for (RoundId slot = 0; slot < kRing; ++slot) {
      mine.commit(slot_offset(slot), bytes + sizeof(SlotHead));
    }
    room_ = bytes;
  }

  /// The place of the payload. A text that explains an error may be longer than what was reserved:
  /// the slots are this rank's own, so it makes room alone.
  std::byte* begin_post(const SlotHead& head, std::size_t bytes) {
    if (open_.size() > 1 || (open_.size() == 1 && open_.front() + 1 != next_)) {
      throw InvalidArgument("control plane: round " + std::to_string(open_.front()) +
                            " must be taken before round " + std::to_string(next_) +
                            " is posted (B1), on rank " + std::to_string(group_.rank));
    }
    if (!first_dead_ && aborted()) first_dead_ = next_;
    make_room(bytes);
    std::byte* const to = slot(group_.rank, next_);
    std::memcpy(to, &head, sizeof(head));
    posted_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return to + sizeof(head);
  }

  RoundId end_post() {
    const RoundId round = next_++;
    open_.push_back(round);
    head(group_.rank).posted.store(next_, std::memory_order_release);
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
    if (std::find(open_.begin(), open_.end(), round) == open_.end()) {
      throw InvalidArgument("control plane: round " + std::to_string(round) +
                            " is not open on rank " + std::to_string(group_.rank) +
                            ": never posted or taken already");
    }
    if (first_dead_ && round >= *first_dead_) throw WorldBroken(*aborted());
    if (posted_by_all(round)) return true;
    if (const auto text = aborted()) {
      // The rank that aborted may have posted just before: what was agreed is still told (C2).
      if (posted_by_all(round)) return true;
      throw WorldBroken(*text);
    }
    return false;
  }

  void take(RoundId round) { open_.erase(std::find(open_.begin(), open_.end(), round)); }

  /// Compared by every rank from the same slots, so all of them throw the same.
  void agree_on_heads(RoundId round, Kind kind) const {
    const SlotHead first = slot_head(0, round);
    for (int rank = 1; rank < group_.size; ++rank) {
      const SlotHead other = slot_head(rank, round);
      const bool agree = kind == Kind::kText ? other.kind == first.kind : other == first;
      if (agree) continue;
      throw Mismatch("control round " + std::to_string(round) + ": rank 0 posted " +
                     describe(first) + ", rank " + std::to_string(rank) + " " + describe(other) +
                     "; do all ranks have the same engines?");
    }
    if (first.kind != kind) {
      throw InvalidArgument("control round " + std::to_string(round) + " holds " + describe(first) +
                            " and was asked for the other kind");
    }
  }

  void read_message(int rank, RoundId round, Message& message) const {
    const SlotHead head = slot_head(rank, round);
    const std::byte* from = payload(rank, round);
    from = read_words(from, head.sizes[0], message.ors);
    from = read_words(from, head.sizes[1], message.mins);
    from = read_words(from, head.sizes[2], message.maxs);
    read_words(from, head.sizes[3], message.sums);
  }

  const Group group_;
  std::optional<RoundId> first_dead_;  // posted here when the world was aborted already
  const std::vector<std::shared_ptr<Segment>> segments_;  // by rank
  std::size_t room_ = 0;                                  // bytes a slot can take
  RoundId next_ = 0;
  std::vector<RoundId> open_;  // posted and not taken, ascending
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
