// kernels/stream.cpp: the host's waits for marks.
#include "kernels/stream.h"

#include <algorithm>
#include <thread>

namespace tandem::kernels {

// Polled: a device's own blocking wait knows no deadline. At first without a pause, then with ever
// longer ones up to a tenth of a millisecond, which is little against what is worth waiting for.
bool Mark::wait_until(std::chrono::steady_clock::time_point until) const {
  using std::chrono::microseconds;
  constexpr int kSpins = 100;
  microseconds pause{1};
  for (int turn = 0; !complete(); ++turn) {
    if (std::chrono::steady_clock::now() >= until) return false;
    if (turn < kSpins) continue;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, microseconds(100));
  }
  return true;
}

void ImmediateStream::wait(const Mark& mark) {
  while (!mark.wait_until(std::chrono::steady_clock::now() + std::chrono::hours(1))) {
  }
}

}  // namespace tandem::kernels
