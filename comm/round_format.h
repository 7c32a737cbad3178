// comm/round_format.h: what control planes have in common: which rounds are open, and how a message
// or a text lies in memory: a head, then the sections or the text without gaps. Ranks of one world
// run the same program on the same kind of machine, so words are the machine's.
// Called by comm (control planes).
#pragma once

#include "comm/control_plane.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem::comm {

enum class RoundKind : std::uint64_t { kMessage = 0, kText = 1 };

struct RoundHead {
  RoundKind kind = RoundKind::kMessage;
  std::array<std::uint64_t, 4> sizes{};  // words of ors, mins, maxs, sums; or {bytes, 0, 0, 0}

  static RoundHead of(const Message& message);
  static RoundHead of(const std::string& text);
  [[nodiscard]] std::size_t payload_bytes() const;
  bool operator==(const RoundHead&) const = default;
};

/// The most that a round carries, on any plane.
inline constexpr std::size_t kMaxRoundBytes = (std::size_t{64} << 20) - sizeof(RoundHead);
/// Throws InvalidArgument above it.
void check_round_bytes(std::size_t bytes, int rank);

/// Head and payload; `to` takes sizeof(RoundHead) + payload_bytes().
void write_round(std::byte* to, const RoundHead& head, const Message& message);
void write_round(std::byte* to, const RoundHead& head, const std::string& text);

[[nodiscard]] RoundHead read_head(const std::byte* from);
void read_round(const std::byte* from, Message& message);
[[nodiscard]] std::string read_text(const std::byte* from);

/// Compares what all ranks posted, in rank order, so that all of them throw the same: Mismatch if
/// they differ, InvalidArgument if they are not of `kind`.
void agree_on_heads(std::span<const RoundHead> heads, RoundKind kind, RoundId round);

/// The rounds that one rank has posted and not taken.
/// B1 Round n is posted only when this rank has taken every round up to n - 2.
class OpenRounds {
 public:
  explicit OpenRounds(int rank) : rank_(rank) {}

  [[nodiscard]] RoundId next() const { return next_; }
  /// Throws InvalidArgument if B1 forbids the next post.
  void check_post() const;
  RoundId add();
  /// Throws InvalidArgument if `round` was never posted, or taken already.
  void check_open(RoundId round) const;
  void take(RoundId round);

 private:
  const int rank_;
  RoundId next_ = 0;
  std::vector<RoundId> open_;  // ascending
};

}  // namespace tandem::comm
