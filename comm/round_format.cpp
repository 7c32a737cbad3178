#include "comm/round_format.h"

#include "comm/memory_limit.h"
#include <tandem/error.h>

#include <algorithm>
#include <cstring>

namespace tandem::comm {

namespace {

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

std::string describe(const RoundHead& head) {
  if (head.kind == RoundKind::kText) return "a text";
  return "a message of " + std::to_string(head.sizes[0]) + " ors, " +
         std::to_string(head.sizes[1]) + " mins, " + std::to_string(head.sizes[2]) + " maxs, " +
         std::to_string(head.sizes[3]) + " sums";
}

}  // namespace

RoundHead RoundHead::of(const Message& message) {
  return RoundHead{
      RoundKind::kMessage,
      {message.ors.size(), message.mins.size(), message.maxs.size(), message.sums.size()}};
}

RoundHead RoundHead::of(const std::string& text) {
  return RoundHead{RoundKind::kText, {text.size(), 0, 0, 0}};
}

std::size_t RoundHead::payload_bytes() const {
  if (kind == RoundKind::kText) return sizes[0];
  return (sizes[0] + sizes[1] + sizes[2] + sizes[3]) * sizeof(std::uint64_t);
}

void check_round_bytes(std::size_t bytes, int rank) {
  if (bytes <= kMaxRoundBytes) return;
  throw InvalidArgument("control plane: a message of " + describe_bytes(bytes) + " on rank " +
                        std::to_string(rank) + "; at most " + describe_bytes(kMaxRoundBytes) +
                        " fit: use fewer or smaller engines in one world");
}

void write_round(std::byte* to, const RoundHead& head, const Message& message) {
  std::memcpy(to, &head, sizeof(head));
  to = write_words(to + sizeof(head), message.ors);
  to = write_words(to, message.mins);
  to = write_words(to, message.maxs);
  write_words(to, message.sums);
}

void write_round(std::byte* to, const RoundHead& head, const std::string& text) {
  std::memcpy(to, &head, sizeof(head));
  if (!text.empty()) std::memcpy(to + sizeof(head), text.data(), text.size());
}

RoundHead read_head(const std::byte* from) {
  RoundHead head;
  std::memcpy(&head, from, sizeof(head));
  return head;
}

void read_round(const std::byte* from, Message& message) {
  const RoundHead head = read_head(from);
  from = read_words(from + sizeof(head), head.sizes[0], message.ors);
  from = read_words(from, head.sizes[1], message.mins);
  from = read_words(from, head.sizes[2], message.maxs);
  read_words(from, head.sizes[3], message.sums);
}

std::string read_text(const std::byte* from) {
  const RoundHead head = read_head(from);
  return {reinterpret_cast<const char*>(from + sizeof(head)), head.sizes[0]};
}

void agree_on_heads(std::span<const RoundHead> heads, RoundKind kind, RoundId round) {
  const RoundHead& first = heads[0];
  for (std::size_t rank = 1; rank < heads.size(); ++rank) {
    const RoundHead& other = heads[rank];
    const bool agree = kind == RoundKind::kText ? other.kind == first.kind : other == first;
    if (agree) continue;
    throw Mismatch("control round " + std::to_string(round) + ": rank 0 posted " + describe(first) +
                   ", rank " + std::to_string(rank) + " " + describe(other) +
                   "; do all ranks have the same engines?");
  }
  if (first.kind != kind) {
    throw InvalidArgument("control round " + std::to_string(round) + " holds " + describe(first) +
                          " and was asked for the other kind");
  }
}

void OpenRounds::check_post() const {
  if (open_.size() > 1 || (open_.size() == 1 && open_.front() + 1 != next_)) {
    throw InvalidArgument("control plane: round " + std::to_string(open_.front()) +
                          " must be taken before round " + std::to_string(next_) +
                          " is posted (B1), on rank " + std::to_string(rank_));
  }
}

RoundId OpenRounds::add() {
  open_.push_back(next_);
  return next_++;
}

void OpenRounds::check_open(RoundId round) const {
  if (std::find(open_.begin(), open_.end(), round) == open_.end()) {
    throw InvalidArgument("control plane: round " + std::to_string(round) +
                          " is not open on rank " + std::to_string(rank_) +
                          ": never posted or taken already");
  }
}

void OpenRounds::take(RoundId round) { open_.erase(std::find(open_.begin(), open_.end(), round)); }

}  // namespace tandem::comm
