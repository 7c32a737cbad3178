// kernels/stream.h: the order of work on a device, and points in it.
//
// On a GPU a stream is a CUDA stream and a mark an event of it; on the CPU work is over when the
// call returns, so every mark is complete. kernels/simulated_device.h has streams that are neither:
// threads with random delays, on which a missing wait shows as wrong bits.
//
// M1 A mark is complete only when everything that its stream was given before it is.
// M2 After a.wait(m), what is given to `a` later starts only when m is complete.
// Thread safety: any thread; order among several threads that use one stream is theirs to keep.
// Called by comm, zero and engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tandem::kernels {

/// The device, its driver or its library failed. Says which call, on what, and why.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Device memory could not be had. Says how much was asked for.
class OutOfDeviceMemory : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// A point in a stream. Copies share the point; an empty mark is complete.
class Mark {
 public:
  class State {
   public:
    State() = default;
    virtual ~State() = default;
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    State(State&&) = delete;
    State& operator=(State&&) = delete;
    /// Throws DeviceError if the device failed.
    [[nodiscard]] virtual bool complete() const = 0;
    /// When it was complete, in seconds since `earlier`, a mark of the same device; both are
    /// complete.
    [[nodiscard]] virtual double seconds_since(const State& earlier) const = 0;
  };

  Mark() = default;
  explicit Mark(std::shared_ptr<State> state) : state_(std::move(state)) {}

  [[nodiscard]] bool complete() const { return state_ == nullptr || state_->complete(); }
  /// Blocks the host. False when `until` passes first. Throws DeviceError.
  [[nodiscard]] bool wait_until(std::chrono::steady_clock::time_point until) const;
  /// 0 for empty marks.
  [[nodiscard]] double seconds_since(const Mark& earlier) const {
    return state_ == nullptr || earlier.state_ == nullptr ? 0.0
                                                          : state_->seconds_since(*earlier.state_);
  }
  /// Null for an empty mark; for streams of the same device.
  [[nodiscard]] State* state() const { return state_.get(); }

 private:
  std::shared_ptr<State> state_;
};

using Marks = std::vector<Mark>;

class Stream {
 public:
  Stream() = default;
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  Stream(Stream&&) = delete;
  Stream& operator=(Stream&&) = delete;

  /// The point after everything given so far.
  [[nodiscard]] virtual Mark record() = 0;
  /// M2. The host does not wait.
  virtual void wait(const Mark& mark) = 0;
  /// Equal for two objects that stand for the same order of work.
  [[nodiscard]] virtual std::uintptr_t id() const = 0;

  void wait(const Marks& marks) {
    for (const Mark& mark : marks) wait(mark);
  }
};

/// The CPU's: work is over when the call that gave it returns.
class ImmediateStream final : public Stream {
 public:
  using Stream::wait;
  [[nodiscard]] Mark record() override { return {}; }
  void wait(const Mark& mark) override;
  [[nodiscard]] std::uintptr_t id() const override { return 0; }
};

}  // namespace tandem::kernels
