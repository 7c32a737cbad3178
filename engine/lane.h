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
#include "kernels/stream.h"
#include "zero/torch_device.h"

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <string>

namespace tandem::engine {

struct Lane {
  explicit Lane(c10::Device device) : where(device) {}

  c10::Device where;
  // In this order, so that they are destroyed before what they work on.
  std::unique_ptr<zero::TorchDevice> torch;
  std::unique_ptr<kernels::Stream> stream;  // of reductions and gathers
  std::unique_ptr<comm::DataPlane> plane;

  /// LibTorch's stream in the step at hand: norm and update are given to it.
  kernels::Stream* step = nullptr;

  /// What the user's stream waits for after a step and the host does not: watched by the progress
  /// thread, so that a rank that is gone does not make the user wait for ever.
  struct Watch {
    kernels::Mark mark;
    comm::Deadline deadline;
    std::string what;
  };
  std::optional<Watch> watch;
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

  /// Why nothing can be trained there, or nothing.
  [[nodiscard]] virtual std::string objection(c10::Device device) const = 0;
  /// Collective. Throws DeviceError, OutOfMemory, Timeout: the same on all ranks.
  [[nodiscard]] virtual std::unique_ptr<Lane> open(c10::Device device, const LaneLinks& links) = 0;
};

/// The CPU, and CUDA devices where this build has CUDA.
[[nodiscard]] std::unique_ptr<Lanes> make_lanes();

}  // namespace tandem::engine
