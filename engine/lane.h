// engine/lane.h: one of the devices that a rank trains on, with what moves gradients and parameters
// there: the CPU, or the rank's GPU.
//
// All engines of a device share its lane, and with it one stream of reductions and gathers and one
// data plane. The world's queue gives them work in the agreed order (kernels/queue.h), so that is
// the order on the stream as well.
// Called by engine/world_state.
#pragma once

#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/deadline.h"
#include "comm/rendezvous.h"
#include "engine/trace.h"
#include "kernels/stream.h"
#include "zero/torch_device.h"

#include <c10/core/Device.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tandem::engine {

struct Lane {
  explicit Lane(c10::Device device) : where(device) {}

  c10::Device where;
  // In this order, so that they are destroyed before what they work on.
  std::unique_ptr<zero::TorchDevice> torch;
  std::unique_ptr<kernels::Stream> stream;  // of reductions and gathers
  std::unique_ptr<comm::DataPlane> host;    // where `plane` is staged through the host's memory
  std::unique_ptr<comm::DataPlane> plane;

  /// Work is done some time after it was given, as on a GPU.
  bool asynchronous = false;

  /// Notes a reduction from `begin` until now, both on `stream`; by the queue's thread.
  void reduced(kernels::Mark begin, const Trace::About& about, comm::Deadline deadline);
  /// Seconds that the reductions noted so far took, all of them complete; traced as well. `done`: a
  /// mark behind them, seen complete just now.
  double take_reductions(const kernels::Mark& done, Trace& trace);

  /// LibTorch's stream in the step at hand: norm and update are given to it.
  kernels::Stream* step = nullptr;
  /// When that stream began to wait for the reductions, and when it had them.
  kernels::Mark asked;
  kernels::Mark reductions_done;

  /// The world is broken, and what was under way here was ended.
  bool ended = false;

  /// Waits for a mark; ends what does not end by its deadline, and at once what a broken world
  /// leaves without an end. False if it was ended, or the world is broken.
  [[nodiscard]] bool finish(const kernels::Mark& mark, comm::Deadline deadline) noexcept;

  /// Work that only a stream waits for, and by when it must be done; any thread.
  void watch(kernels::Mark mark, comm::Deadline deadline, std::string what);
  /// What is not done by its deadline, if anything.
  [[nodiscard]] std::optional<std::string> first_late();

 private:
  struct Reduction {
    kernels::Mark begin;
    kernels::Mark end;
    Trace::About about;
  };
  struct Watched {
    kernels::Mark mark;
    comm::Deadline deadline;
    std::string what;
  };
  std::mutex mutex_;  // guards the next two
  std::vector<Reduction> reductions_;
  std::deque<Watched> watched_;  // in the order in which they end
};

/// What a device's plane is made of; see comm/device_data_plane.h.
struct LaneLinks {
  comm::Rendezvous& rendezvous;
  comm::ControlPlane& control;
  comm::Deadline deadline;
};

/// Where lanes come from; tests have devices of their own.
class Lanes {
 public:
  Lanes() = default;
  virtual ~Lanes() = default;
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;
  Lanes(Lanes&&) = delete;
  Lanes& operator=(Lanes&&) = delete;

  /// On which lane the engine of that name trains, its tensors being on `device`: that device's;
  /// tests simulate a GPU for some of the CPU's engines.
  [[nodiscard]] virtual c10::Device place(const std::string& /*engine*/, c10::Device device) const {
    return device;
  }
  /// Why nothing can be trained there, or nothing.
  [[nodiscard]] virtual std::string objection(c10::Device device) const = 0;
  /// Collective. Throws DeviceError, OutOfMemory, Timeout: the same on all ranks.
  [[nodiscard]] virtual std::unique_ptr<Lane> open(c10::Device device, const LaneLinks& links) = 0;
};

/// What the ranks of a world are.
enum class Ranks : std::uint8_t { kProcesses, kThreads };

/// The CPU, and CUDA devices where this build has CUDA. Not for several ranks that are threads:
/// LibTorch has one thread a process for the backward passes of a GPU, so that a rank that waits
/// for another one's would wait for itself.
[[nodiscard]] std::unique_ptr<Lanes> make_lanes(Ranks ranks);

}  // namespace tandem::engine
