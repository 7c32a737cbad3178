// comm/shared_channel.h: one engine's channel between the ranks of one node.
//
// Each rank has one segment a channel: a head (its counters and its bell), a ring of post records,
// its parameter memory, its staging slots. Only the owner writes it; peers read. A rank that has
// something new (a post, a fold done, a part gathered) publishes the counter (release) and rings
// its own bell; who waits for that rank reads the counter (acquire) and sleeps on that bell.
//
// H1 A record and its staging are written before `posted` passes them and not again before every
//    rank's `folded` has passed them: the ring is larger than posts_in_flight, and staging is freed
//    by the least `folded` (staging_pool.h G1).
// H2 Parameter memory of a rank is read by peers between its post_gather() and their `gathered`.
// Called by comm/shared_data_plane.
#pragma once

#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/futex.h"
#include "comm/segment.h"
#include "comm/staging_pool.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

/// Where everything lies in a segment; a pure function of the spec, so the same on all ranks.
struct ChannelLayout {
  explicit ChannelLayout(const ChannelSpec& spec);

  std::size_t ring = 0;  // records, a power of two
  std::size_t parameters_at = 0;
  std::size_t staging_at = 0;  // what lies before is committed when the channel is opened
  std::size_t slot_bytes = 0;
  std::size_t segment_bytes = 0;
};

class SharedChannel final : public Channel {
 public:
  /// Makes this rank's segment, with everything but the staging committed. Throws OutOfMemory,
  /// SystemError, InvalidArgument.
  static std::shared_ptr<Segment> make_segment(const ChannelSpec& spec, Group group);

  /// Over all ranks' segments, in rank order. `control` outlives the channel.
  SharedChannel(ChannelSpec spec,
                Group group,
                std::vector<std::shared_ptr<Segment>> segments,
                ControlPlane& control);

  [[nodiscard]] Group group() const override { return group_; }
  Staging acquire(std::size_t bytes) override;
  void give_back(Staging staging) override;
  PostId post(Staging staging, kernels::Dtype wire) override;
  void fold(PostId post,
            std::int64_t begin,
            std::int64_t numel,
            float* acc,
            kernels::Accumulator state,
            const std::string& what,
            Deadline deadline) override;
  [[nodiscard]] bool folded_by_all() const override;
  void wait_folded_by_all(const std::string& what, Deadline deadline) override;
  void trim(int idle_generations) override;

  [[nodiscard]] std::shared_ptr<std::byte> parameters() override;
  std::uint64_t post_gather() override;
  void gather(std::uint64_t gather,
              const std::function<ByteRange(int rank)>& of_rank,
              const std::string& what,
              Deadline deadline) override;
  void wait_gathered_by_all(const std::string& what, Deadline deadline) override;

  [[nodiscard]] std::size_t staging_bytes() const override { return pool_.committed_bytes(); }
  [[nodiscard]] std::uint64_t reduced_bytes() const override {
    return reduced_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t gathered_bytes() const override {
    return gathered_bytes_.load(std::memory_order_relaxed);
  }

 private:
  struct Head;
  struct Record;
  using Counter = std::atomic<std::uint64_t> Head::*;

  [[nodiscard]] Head& head(int rank) const;
  [[nodiscard]] Record& record(int rank, PostId post) const;
  [[nodiscard]] std::uint64_t least(Counter counter) const;
  /// Publishes this rank's counter and wakes who waits for it.
  void publish(Counter counter, std::uint64_t value);
  /// Waits until the counter of `rank` is at least `target`.
  void await(
      int rank, Counter counter, std::uint64_t target, const std::string& what, Deadline deadline);
  [[noreturn]] void time_out(Counter counter, std::uint64_t target, const std::string& what) const;

  const ChannelSpec spec_;
  const ChannelLayout layout_;
  const Group group_;
  const std::vector<std::shared_ptr<Segment>> segments_;  // by rank
  ControlPlane& control_;
  const bool spin_;
  StagingPool pool_;
  std::vector<kernels::Slice> slices_;  // of the fold at hand
  std::atomic<std::uint64_t> reduced_bytes_{0};
  std::atomic<std::uint64_t> gathered_bytes_{0};
};

}  // namespace tandem::comm
