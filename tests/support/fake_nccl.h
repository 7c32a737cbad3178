// tests/support/fake_nccl.h: NCCL for ranks that are threads, over streams of the simulated device.
//
// A group of calls becomes one piece of work on its stream: when its turn comes it meets the peers'
// matching calls and copies there, so it runs late and in stream order, as on a GPU. What NCCL
// leaves undefined is a problem here, and fails the test:
// F1 Sends and receives between two ranks match in their order: element count and type.
// F2 Every rank makes the same collective calls in the same order: kind, bytes, root.
// F3 Calls lie in groups, one at a time, on one stream for each communicator; receives of a group
//    do not overlap.
// Some sends are done for their rank as soon as they are buffered, and are lost if its communicator
// ends before they are received: work that is done here may still be needed by a peer.
// A call that its peers never match hangs, as in NCCL. After abort() a call throws DeviceError and
// is counted.
#pragma once

#include "comm/nccl.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tandem::test_support {

class FakeNccl {
 public:
  /// Of one rank; -1: never. Counts begin at 0 with the rank's first call or group.
  struct Faults {
    bool join = false;                // joining throws DeviceError
    std::int64_t failing_call = -1;   // throws DeviceError: group_start, send, ..., group_end
    std::int64_t hanging_group = -1;  // its work does not end before an abort
    std::int64_t untaken_group = -1;  // group_end() waits for its deadline, then Timeout
  };

  explicit FakeNccl(int ranks);
  /// Fails the test for problems that nobody took.
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;
  FakeNccl(FakeNccl&&) = delete;
  FakeNccl& operator=(FakeNccl&&) = delete;

  /// The library as one rank sees it; this object outlives it and its communicators.
  [[nodiscard]] std::unique_ptr<comm::Nccl> library(int rank);

  void set_faults(int rank, const Faults& faults);
  /// check() throws it from now on.
  void report_async_error(int rank, const std::string& text);

  // Of one rank, over all its communicators.
  [[nodiscard]] std::int64_t calls(int rank) const;
  [[nodiscard]] std::int64_t calls_after_abort(int rank) const;
  [[nodiscard]] std::int64_t groups(int rank) const;
  [[nodiscard]] std::int64_t all_gathers(int rank) const;
  [[nodiscard]] std::int64_t broadcasts(int rank) const;
  [[nodiscard]] std::int64_t aborts(int rank) const;
  /// Groups under way, and sends that a peer had not received, when a communicator ended without an
  /// abort: an orderly end has none.
  [[nodiscard]] std::int64_t cut_off(int rank) const;
  /// Given to a stream and not over.
  [[nodiscard]] std::int64_t groups_under_way(int rank) const;
  /// Stream::id() of the calls.
  [[nodiscard]] std::vector<std::uintptr_t> streams(int rank) const;

  [[nodiscard]] std::vector<std::string> take_problems();

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace tandem::test_support
