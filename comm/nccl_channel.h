// comm/nccl_channel.h: one engine's channel between devices, over NCCL.
//
// A reduction is one group of sends and receives: to each peer the elements it folds, straight from
// staging, from each peer the elements this rank folds, into memory that all channels use in turn;
// then a fold in rank order (kernels/fold.h F2). Bytes on the wire, each way: those of R - 1 slices
// of N / R elements.
// N1 A rank without a contribution sends zeros, because its peers cannot know: the sum's bits are
//    the same (kernels/fold.h F3).
// N2 A world of one rank has no communicator and makes no call of NCCL.
// Called by comm/nccl_data_plane.
#pragma once

#include "comm/device_channel.h"
#include "comm/nccl.h"

#include <memory>
#include <string>

namespace tandem::comm {

class NcclLink final : public DeviceLink {
 public:
  /// `communicator` is null for one rank (N2). `nccl` is kept as long as it.
  NcclLink(const DeviceLinks& links,
           std::unique_ptr<Nccl> nccl,
           std::unique_ptr<NcclCommunicator> communicator);

  void check() override;
  void abort() noexcept override;
  [[nodiscard]] NcclCommunicator& communicator() const { return *communicator_; }

 private:
  const std::unique_ptr<Nccl> nccl_;
  // Ended before the base waits for what is under way on the memory it has kept.
  const std::unique_ptr<NcclCommunicator> communicator_;
};

class NcclChannel final : public DeviceChannel {
 public:
  NcclChannel(const ChannelSpec& spec,
              std::shared_ptr<NcclLink> link,
              std::shared_ptr<std::byte> parameters);

 protected:
  void give_fold(const Post& post, Sum sum, const std::string& what, Deadline deadline) override;
  void give_gather(const Ranges& ranges, const std::string& what, Deadline deadline) override;

 private:
  /// Elements [begin, end) of each rank's part that are exchanged and folded at once.
  [[nodiscard]] ElementRange piece_of(const Post& post, int rank, std::int64_t at) const;
  /// Sends this piece of every peer's part and receives the peers' of this rank's.
  void exchange(
      const Post& post, std::int64_t at, std::byte* received, std::byte* zeros, Deadline deadline);
  [[nodiscard]] std::byte* place_of(std::byte* received, int peer) const;

  const std::shared_ptr<NcclLink> nccl_;
  const std::size_t piece_bytes_;  // of one peer
};

}  // namespace tandem::comm
