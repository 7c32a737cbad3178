// comm/pacer.h: how long to sleep between two looks at messages, which ring no bell.
//
// Peers come at the same time as a rule, so the first looks are close together; then the core is
// left to those who compute: 50 us cost a seventh of a core, 1 ms next to nothing. Called by comm
// (message_control_plane, shared_channel).
#pragma once

#include <chrono>

namespace tandem::comm {

class Pacer {
 public:
  /// It is still early: whoever is waited for probably comes at any moment.
  [[nodiscard]] bool eager() const { return looks_ < 100; }
  /// The pause before the next look.
  std::chrono::microseconds next() {
    const bool early = eager();
    ++looks_;
    if (early) return std::chrono::microseconds(50);
    if (looks_ <= 500) return std::chrono::microseconds(200);
    return std::chrono::microseconds(1000);
  }

 private:
  int looks_ = 0;
};

}  // namespace tandem::comm
