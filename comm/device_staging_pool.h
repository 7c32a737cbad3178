// comm/device_staging_pool.h: the staging slots of one rank's channel, in device memory.
//
// G1 A slot is free, held (acquired), or in flight (posted, its fold not yet given to the stream).
//    A free slot may still be in use by work on streams: its marks, which its next writer waits for
//    there.
// G2 Free slots that are large enough are reused hottest first, as long as no work uses them. If
//    work uses all of them, a further slot gets memory, so that writing does not wait for a
//    reduction; but no more than kInUse at once wait for their work like that: the host runs far
//    ahead of a device, and staging would grow to all of an engine's gradients although the device
//    keeps pace. Then the one whose work comes first is taken.
// Memory is allocated as far as a slot was ever asked for. Thread safety: one thread at a time;
// bytes() from any thread. Called by comm/device_channel.
#pragma once

#include "comm/data_plane.h"
#include "comm/device_memory.h"

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

class DeviceStagingPool {
 public:
  static constexpr std::size_t kInUse = 4;

  /// `device` and `retired` outlive the pool.
  DeviceStagingPool(const ChannelSpec& spec, kernels::Device& device, RetiredMemory& retired);

  /// Throws OutOfMemory; InvalidArgument if no slot is free or `bytes` is above the spec's.
  Staging acquire(std::size_t bytes);
  void give_back(Staging staging);
  /// The slot is in flight until folded().
  void posted(const Staging& staging);
  /// What folds the slot has been given to its stream; `last` comes behind it.
  void folded(std::int32_t slot, kernels::Mark last);
  /// Counts a generation and frees the memory of slots that were free for that many and that no
  /// work uses.
  void trim(int idle_generations);
  /// Gives up all slots; posted ones are used until `last` and by their writers.
  void retire(const kernels::Marks& last) noexcept;

  [[nodiscard]] std::size_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  enum class State : std::uint8_t { kFree, kHeld, kInFlight };
  struct Slot {
    State state = State::kFree;
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
    kernels::Marks users;
    std::int64_t last_used = 0;  // generation
  };

  Slot& slot(std::int32_t index) { return slots_[static_cast<std::size_t>(index)]; }
  Slot& held(const Staging& staging, const char* action);
  /// Where in free_ the slot for `bytes` is (G2).
  std::size_t choose(std::size_t bytes);
  void make_free(std::int32_t index);

  const std::string channel_;
  const std::size_t largest_;
  kernels::Device& device_;
  RetiredMemory& retired_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> free_;  // the one used last at the back
  std::int64_t generation_ = 0;
  std::atomic<std::size_t> bytes_{0};
};

}  // namespace tandem::comm
