// comm/control_plane.h: rounds of small messages by which ranks agree.
//
// A round is a nonblocking all-reduce of 64-bit words under an associative, commutative merge. A
// rank's k-th round meets every other rank's k-th. At most two rounds may be open on a rank (a gate
// and its close).
//
// C1 test() never blocks; only wait() does, with a deadline.
// C2 After abort() on any rank, every test of a round that some rank will never post throws the
//    same WorldBroken, promptly; a round that all ranks had posted before is still delivered.
// Thread safety: posts and tests are called under the caller's lock; wait_for_change and
// abort from any thread.
// Called by engine.
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tandem::comm {

/// One rank's message, or the merged one. All ranks' messages of a round have equal section sizes.
struct Message {
  std::vector<std::uint64_t> ors;   // merged by bitwise or
  std::vector<std::uint64_t> mins;  // by minimum
  std::vector<std::uint64_t> maxs;  // by maximum
  std::vector<std::int64_t> sums;   // by sum

  void merge(const Message& other);  // sizes must agree
  bool operator==(const Message&) const = default;
};

using RoundId = std::uint64_t;  // from 0, the same on all ranks

class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  [[nodiscard]] virtual Group group() const = 0;

  /// Makes room for messages (and texts) of up to `bytes`; collective in the sense that every rank
  /// calls it at the same point of its rounds, with no round open. Throws OutOfMemory.
  virtual void reserve(std::size_t bytes) = 0;

  /// Posts this rank's message of its next round. Never blocks.
  virtual RoundId post(const Message& message) = 0;
  /// The merged message if every rank has posted, else nothing. Each round is taken once.
  virtual std::optional<Message> test(RoundId round) = 0;
  /// Posts a text as the next round; collect with test_texts. For explanations of errors.
  virtual RoundId post_text(const std::string& text) = 0;
  /// Each rank's text in rank order, if every rank has posted, else nothing. Taken once.
  virtual std::optional<std::vector<std::string>> test_texts(RoundId round) = 0;
  /// Ranks that have not posted `round` yet, for messages of Timeout.
  [[nodiscard]] virtual std::vector<int> missing(RoundId round) const = 0;

  /// A counter that grows whenever any rank posts, aborts or wakes.
  [[nodiscard]] virtual std::uint32_t change() const = 0;
  /// Sleeps until change() differs from `seen` or `until` passes.
  virtual void wait_for_change(std::uint32_t seen, Clock::time_point until) = 0;
  /// Wakes this rank's own sleepers (all ranks' may wake too).
  virtual void wake() = 0;

  /// Breaks the world for every rank: the first text wins and is what all of them throw.
  virtual void abort(const std::string& text) = 0;
  /// The text of the abort, if there was one.
  [[nodiscard]] virtual std::optional<std::string> aborted() const = 0;

  /// Bytes this rank has posted so far, and rounds.
  [[nodiscard]] virtual std::uint64_t posted_bytes() const = 0;
  [[nodiscard]] virtual std::uint64_t posted_rounds() const = 0;
};

}  // namespace tandem::comm
