// comm/futex.h: sleeping on a word of shared memory until another rank, thread or process, rings.
//
// A bell is a pair of 32-bit atomics in zeroed shared memory. Who changes something first publishes
// the change (a release store of its own), then rings. Who waits reads the count, looks at what it
// waits for, and only then sleeps on the count it read: a ring in between ends the sleep at once,
// so no wake is lost. Sleeps are cut into short slices all the same, because a peer may die between
// its store and its ring; after each slice the caller looks again (aborts, deadline, counters). A
// sleeper that dies leaves `sleepers` too high, which costs needless wakes and nothing else. Called
// by comm (control and data planes).
#pragma once

#include "comm/deadline.h"

#include <atomic>
#include <chrono>
#include <cstdint>

namespace tandem::comm {

/// The longest sleep between two looks at what is waited for.
inline constexpr std::chrono::milliseconds kSleepSlice{20};

class Bell {
 public:
  /// The count to read before looking at what is waited for.
  [[nodiscard]] std::uint32_t count() const { return count_.load(std::memory_order_acquire); }
  /// Wakes every sleeper. Orders everything the caller wrote before it.
  void ring();
  /// Returns when the count differs from `seen`, when `until` or one slice has passed, or for no
  /// reason at all.
  void sleep(std::uint32_t seen, Clock::time_point until);

 private:
  std::atomic<std::uint32_t> count_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
                  std::atomic<std::uint64_t>::is_always_lock_free,
              "atomics in memory shared between processes must be lock-free");

/// True if this process may use more cores than `ranks`, so that a wait may spin for a moment
/// without taking the core of the rank it waits for.
[[nodiscard]] bool may_spin(int ranks);

/// Busy-waits about a microsecond.
void spin_once();

}  // namespace tandem::comm
