// comm/nccl.h: every NCCL call that Tandem makes, behind one interface, so that tests replace the
// library by one that needs no GPU and checks order, counts, streams and what follows an error.
//
// Work is given to a stream and done in its order. Every rank of a communicator makes the same
// calls in the same order; between group_start() and group_end() the order of sends and receives
// does not matter. Errors are thrown as DeviceError with NCCL's own words; a group that one is
// thrown from is over, and nothing of it was given.
// Thread safety: one thread at a time, but for check() and abort().
// Called by comm (nccl_channel, nccl_data_plane).
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "kernels/device.h"
#include "kernels/dtype.h"
#include "kernels/stream.h"

#include <cstddef>
#include <memory>
#include <string>

namespace tandem::comm {

class NcclCommunicator {
 public:
  NcclCommunicator() = default;
  /// Communicates nothing; what is under way is aborted, and what peers have not taken yet may be
  /// lost: before an orderly end all ranks have waited for their work and told each other so.
  virtual ~NcclCommunicator() = default;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  NcclCommunicator(NcclCommunicator&&) = delete;
  NcclCommunicator& operator=(NcclCommunicator&&) = delete;

  virtual void group_start() = 0;
  /// Gives the group to its stream. Throws Timeout if NCCL has not taken it by then.
  virtual void group_end(Deadline deadline) = 0;

  // Inside a group.
  virtual void send(const std::byte* data,
                    std::size_t numel,
                    kernels::Dtype dtype,
                    int to,
                    kernels::Stream& stream) = 0;
  virtual void receive(std::byte* data,
                       std::size_t numel,
                       kernels::Dtype dtype,
                       int from,
                       kernels::Stream& stream) = 0;
  /// all[r * bytes, (r + 1) * bytes) = rank r's mine[0, bytes); mine may be its own place in all.
  virtual void all_gather(const std::byte* mine,
                          std::byte* all,
                          std::size_t bytes,
                          kernels::Stream& stream) = 0;
  /// data[0, bytes) of rank `root` to all others.
  virtual void broadcast(std::byte* data, std::size_t bytes, int root, kernels::Stream& stream) = 0;

  /// Throws DeviceError if the communicator has failed since it was made.
  virtual void check() = 0;
  /// Ends what is under way on this rank; marks recorded behind it complete. Any number of times.
  virtual void abort() noexcept = 0;
};

class Nccl {
 public:
  Nccl() = default;
  virtual ~Nccl() = default;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;
  Nccl(Nccl&&) = delete;
  Nccl& operator=(Nccl&&) = delete;

  /// Bytes that name a communicator to be made; rank 0 gives them to the others.
  [[nodiscard]] virtual std::string unique_id() = 0;
  /// Collective. Throws DeviceError, Timeout.
  [[nodiscard]] virtual std::unique_ptr<NcclCommunicator> join(const std::string& unique_id,
                                                               Group group,
                                                               Deadline deadline) = 0;
};

}  // namespace tandem::comm
