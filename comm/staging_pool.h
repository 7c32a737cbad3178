// comm/staging_pool.h: the staging slots of one rank's channel, in its segment.
//
// G1 A slot is free, held (acquired), or in flight (posted); a posted slot is free again when every
//    rank has folded its post.
// G2 Free slots are reused hottest first: the one used last that has enough committed pages; if
//    none has, the largest grows.
// Slots are evenly spaced in address space; memory is committed as far as a slot was ever asked
// for. Thread safety: one thread at a time; committed_bytes() from any thread. Called by
// comm/shared_channel.
#pragma once

#include "comm/data_plane.h"
#include "comm/segment.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

class StagingPool {
 public:
  /// Slots at `begin`, `begin` + `slot_bytes`, ... of `segment`; both multiples of a page.
  StagingPool(std::string channel,
              std::shared_ptr<Segment> segment,
              std::size_t begin,
              std::size_t slot_bytes,
              std::size_t slots);

  /// Throws OutOfMemory; InvalidArgument if no slot is free or `bytes` is above a slot.
  Staging acquire(std::size_t bytes);
  void give_back(const Staging& staging);
  /// The slot is in flight until free_folded() is told of `post`. Posts ascend.
  void posted(const Staging& staging, PostId post);
  /// Frees the slots of posts below `folded_by_all`.
  void free_folded(PostId folded_by_all);
  /// Counts a generation and releases the pages of slots that were free for that many.
  void trim(int idle_generations);

  [[nodiscard]] std::size_t offset(const Staging& staging) const;
  [[nodiscard]] std::size_t committed_bytes() const {
    return committed_bytes_.load(std::memory_order_relaxed);
  }

 private:
  enum class State : std::uint8_t { kFree, kHeld, kInFlight };
  struct Slot {
    State state = State::kFree;
    std::size_t committed = 0;
    std::int64_t last_used = 0;  // generation
  };
  struct InFlight {
    PostId post = 0;
    std::int32_t slot = 0;
  };

  Slot& held(const Staging& staging, const char* action);
  void make_free(std::int32_t slot);

  std::string channel_;
  std::shared_ptr<Segment> segment_;
  std::size_t begin_;
  std::size_t slot_bytes_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> free_;  // the one used last at the back
  std::deque<InFlight> in_flight_;  // by post
  std::int64_t generation_ = 0;
  std::atomic<std::size_t> committed_bytes_{0};
};

}  // namespace tandem::comm
