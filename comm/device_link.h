// comm/device_link.h: what the channels of one device's plane share: the device, the stream that
// reductions and gathers are done on, memory for what peers send, and whether all is still well.
//
// L1 After abort() nothing more is given to the stream.
// L2 Owned by the plane and its channels together; the device, the stream, the rendezvous and the
//    control plane outlive it.
// Thread safety: any thread. Called by comm (device_channel, nccl_channel, staged_channel).
#pragma once

#include "comm/device_data_plane.h"
#include "comm/device_memory.h"

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

namespace tandem::comm {

class DeviceLink {
 public:
  explicit DeviceLink(const DeviceLinks& links);
  virtual ~DeviceLink() = default;
  DeviceLink(const DeviceLink&) = delete;
  DeviceLink& operator=(const DeviceLink&) = delete;
  DeviceLink(DeviceLink&&) = delete;
  DeviceLink& operator=(DeviceLink&&) = delete;

  /// Throws WorldBroken after an abort, here or on any rank; DeviceError if work has failed.
  virtual void check();
  virtual void abort() noexcept { aborted_ = true; }

  [[nodiscard]] kernels::Device& device() const { return links_.device; }
  [[nodiscard]] kernels::Stream& stream() const { return links_.stream; }
  [[nodiscard]] const Nodes& nodes() const { return links_.rendezvous.nodes(); }
  [[nodiscard]] Group group() const { return group_; }
  [[nodiscard]] RetiredMemory& retired() { return retired_; }
  /// For the peers' slices of the fold at hand.
  [[nodiscard]] Scratch& received() { return received_; }
  /// Never written.
  [[nodiscard]] Scratch& zeros() { return zeros_; }

 private:
  const DeviceLinks links_;
  const Group group_;
  std::atomic<bool> aborted_{false};
  RetiredMemory retired_;
  Scratch received_;
  Scratch zeros_;
};

/// Bytes of one peer's slice that are received and folded at once: a slice of the largest bucket,
/// so that a larger range (everybody's sum on every rank) goes in pieces. The same on all ranks.
[[nodiscard]] std::size_t piece_bytes(const ChannelSpec& spec, int ranks);

/// Refuses what device planes have not, before anything is allocated. Throws InvalidArgument.
void check_device_spec(const ChannelSpec& spec);

}  // namespace tandem::comm
