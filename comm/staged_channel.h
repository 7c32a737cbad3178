// comm/staged_channel.h: one engine's channel between ranks that share a device, or that have no
// NCCL: over the host's plane (shared memory, messages), with copies between device and host.
//
// Peers read each other's slices on the host; the sums are made on the device, so they have the
// bits of any other plane. fold() and gather() run on the queue's thread and block there until the
// host's memory has been copied; the fold itself they only give to the stream.
// Y1 The host's staging is posted when the copy to it is complete, and a slice is given up to its
//    rank when the copy from it is.
// Y2 The host's parameter memory is a mirror: a rank writes its part when all have taken the last
//    gather, and takes the next gather when its copies from the mirror are complete.
// Bytes between device and host: of a reduction the rank's whole contribution down and the peers'
// slices up; of a gather the own part down and the peers' parts up.
// Called by comm/staged_data_plane.
#pragma once

#include "comm/device_channel.h"

#include <memory>
#include <string>

namespace tandem::comm {

class StagedChannel final : public DeviceChannel {
 public:
  /// `host` opens the inner channel, whose fold the returned one does (ChannelSpec::folder).
  StagedChannel(const ChannelSpec& spec,
                std::shared_ptr<DeviceLink> link,
                std::shared_ptr<std::byte> parameters,
                DataPlane& host,
                Deadline deadline);
  ~StagedChannel() override;
  StagedChannel(const StagedChannel&) = delete;
  StagedChannel& operator=(const StagedChannel&) = delete;
  StagedChannel(StagedChannel&&) = delete;
  StagedChannel& operator=(StagedChannel&&) = delete;

  void trim(int idle_generations) override;
  /// The host's as well.
  [[nodiscard]] std::size_t staging_bytes() const override;

 protected:
  void give_fold(const Post& post, Sum sum, const std::string& what, Deadline deadline) override;
  void give_gather(const Ranges& ranges, const std::string& what, Deadline deadline) override;

 private:
  /// The fold at hand.
  struct Folding {
    const Post* post = nullptr;
    std::int64_t folded = 0;  // elements of the own part
    const std::string* what = nullptr;
    Deadline deadline;
  };

  /// The inner channel's folder: copies slices up, folds them there, and waits for the copies.
  void fold_up(std::span<const kernels::Slice> slices,
               std::int64_t numel,
               float* acc,
               kernels::Accumulator state);
  /// Copies `staging` to the host; the inner channel's staging.
  Staging copy_down(const Staging& staging, const std::string& what, Deadline deadline);
  void await(const kernels::Mark& mark, const std::string& what, Deadline deadline);

  const std::size_t piece_bytes_;  // of one peer
  std::mutex host_staging_;        // guards the inner channel's staging: trim() comes from others
  std::unique_ptr<Channel> host_;
  std::shared_ptr<std::byte> mirror_;
  Folding folding_;
  kernels::Mark copied_up_;  // of the last gather
};

}  // namespace tandem::comm
