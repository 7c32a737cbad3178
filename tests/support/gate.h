// tests/support/gate.h: holds up a stream of a simulated device, so that what does not wait for its
// work shows every time.
#pragma once

#include "kernels/simulated_device.h"
#include "kernels/stream.h"

#include <chrono>
#include <future>
#include <utility>

namespace tandem::test_support {

/// Nothing that the stream is given from here on is done before open(), at the latest by the
/// destructor.
class Gate {
 public:
  explicit Gate(kernels::Stream& stream) {
    kernels::give_simulated_work(stream, [open = open_.get_future().share()] { open.wait(); });
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  Gate(Gate&&) = delete;
  Gate& operator=(Gate&&) = delete;

  void open() {
    if (!std::exchange(opened_, true)) open_.set_value();
  }

 private:
  std::promise<void> open_;
  bool opened_ = false;
};

/// True if work up to `mark` is not done although it had time.
inline bool is_held_up(const kernels::Mark& mark) {
  return !mark.wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(100));
}

}  // namespace tandem::test_support
