// comm/deadline.h: the point in time after which a wait is a Timeout. Every wait has one.
#pragma once

#include <chrono>

namespace tandem::comm {

using Clock = std::chrono::steady_clock;

struct Deadline {
  Clock::time_point at;

  static Deadline after(Clock::duration duration) { return Deadline{Clock::now() + duration}; }
  [[nodiscard]] bool passed() const { return Clock::now() >= at; }
};

}  // namespace tandem::comm
