// comm/pacer.h: how long to sleep between two looks at messages, which ring no bell.
//
// Peers come at the same time as a rule, so the first looks are close together; then the core is
// left to those who compute: 50 us cost a seventh of a core, 1 ms next to nothing.
// Called by comm (message_control_plane, shared_channel).
#pragma once

#include "comm/deadline.h"

#include <chrono>

namespace tandem::comm {

class Pacer {
 public:
  /// Something has come, or is waited for from now on.
  void reset() { since_ = Clock::now(); }
  /// It is still early: whoever is waited for probably comes at any moment.
  [[nodiscard]] bool eager() const { return Clock::now() - since_ < kEarly; }
  /// The sleep before the next look.
  [[nodiscard]] std::chrono::microseconds pause() const {
    const auto waited = Clock::now() - since_;
    if (waited < kEarly) return std::chrono::microseconds(50);
    if (waited < 10 * kEarly) return std::chrono::microseconds(200);
    return std::chrono::microseconds(1000);
  }

 private:
  static constexpr std::chrono::milliseconds kEarly{10};
  Clock::time_point since_ = Clock::now();
};

}  // namespace tandem::comm
