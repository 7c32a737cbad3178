// comm/shared_channel.h: one engine's channel: in memory that the ranks of a node share, and by
// messages between nodes.
//
// Each rank has one segment a channel: a head (its counters and its bell), a ring of post records,
// its parameter memory, its staging slots. Only the owner writes it; peers of its node read. A rank
// that has something new (a post, a fold done, a part gathered) publishes the counter (release) and
// rings its own bell; who waits for that rank reads the counter (acquire) and sleeps on that bell.
// With several nodes a wait also moves messages on, so it looks again and again instead (pacer.h).
//
// H1 A record and its staging are written before `posted` passes them and not again before every
//    local rank's `folded` has passed them and its messages have left: the ring is larger than
//    posts_in_flight, and staging is freed by the least of these (staging_pool.h G1).
// H2 Parameter memory of a rank is read by peers between its post_gather() and their `gathered`.
// H3 Slices are folded in world rank order wherever they lie, so the sum has the same bits for any
//    division into nodes.
// H4 A rank whose fold or gather has returned owes its peers no more messages of it: a peer never
//    waits for a rank that computes.
// H5 With share_parameters the parameter memory of the node's first rank is everybody's; a relay
//    writes into it only when all ranks of the node have posted that gather.
// Called by comm/shared_data_plane.
#pragma once

#include "comm/channel_layout.h"
#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/futex.h"
#include "comm/gather_messages.h"
#include "comm/nodes.h"
#include "comm/segment.h"
#include "comm/slice_messages.h"
#include "comm/staging_pool.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

class SharedChannel final : public Channel {
 public:
  /// What crosses nodes; null where there is one.
  struct BetweenNodes {
    std::unique_ptr<Messenger> slices;
    std::unique_ptr<Messenger> parameters;
  };

  /// Makes this rank's segment, with everything but the staging committed. Throws OutOfMemory,
  /// SystemError, InvalidArgument.
  static std::shared_ptr<Segment> make_segment(const ChannelSpec& spec,
                                               int rank,
                                               const Nodes& nodes);

  /// Over the segments of the node's ranks, in rank order, null for others. `nodes` and `control`
  /// outlive the channel.
  SharedChannel(ChannelSpec spec,
                Group group,
                const Nodes& nodes,
                std::vector<std::shared_ptr<Segment>> segments,
                BetweenNodes messengers,
                ControlPlane& control);

  [[nodiscard]] Group group() const override { return group_; }
  Staging acquire(std::size_t bytes) override;
  void give_back(Staging staging) override;
  PostId post(Staging staging, kernels::Dtype wire, const PartOfRank& part) override;
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
  std::uint64_t post_gather(const kernels::Marks& written) override;
  void gather(std::uint64_t gather,
              const std::function<ByteRange(int rank)>& of_rank,
              const std::string& what,
              Deadline deadline) override;
  void wait_gathered_by_all(const std::string& what, Deadline deadline) override;

  [[nodiscard]] std::size_t staging_bytes() const override;
  [[nodiscard]] std::uint64_t reduced_bytes() const override {
    return reduced_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t gathered_bytes() const override {
    return gathered_bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t between_nodes_bytes() const override {
    return between_nodes_bytes_.load(std::memory_order_relaxed);
  }

 private:
  struct Head;
  struct Record;
  using Counter = std::atomic<std::uint64_t> Head::*;
  using OfRank = std::function<ByteRange(int rank)>;

  [[nodiscard]] Head& head(int rank) const;
  [[nodiscard]] Record& record(int rank, PostId post) const;
  [[nodiscard]] std::byte* parameters_of(int rank) const;
  [[nodiscard]] std::uint64_t least(Counter counter) const;
  /// Local ranks whose counter is below `target`.
  [[nodiscard]] std::vector<int> behind(Counter counter, std::uint64_t target) const;
  /// Publishes this rank's counter and wakes who waits for it.
  void publish(Counter counter, std::uint64_t value);

  /// Waits until the counter of local rank `rank` is at least `target`.
  void await(
      int rank, Counter counter, std::uint64_t target, const std::string& what, Deadline deadline);
  /// The same for all local ranks.
  void await_all(Counter counter, std::uint64_t target, const std::string& what, Deadline deadline);
  /// With several nodes: moves messages on until `missing` names nobody.
  void await_messages(const std::function<std::vector<int>()>& missing,
                      const std::string& what,
                      Deadline deadline);
  [[noreturn]] void time_out(const std::vector<int>& missing, const std::string& what) const;

  /// What `rank` contributes to `post`: elements [begin, begin + numel).
  [[nodiscard]] kernels::Slice slice_of(
      int rank, PostId post, std::int64_t begin, std::int64_t numel, const std::string& what) const;
  void fold_slices(std::int64_t numel, float* acc, kernels::Accumulator state);
  /// Below it, posts' staging may be reused (H1).
  [[nodiscard]] PostId settled() const;

  [[nodiscard]] ByteRange checked(ByteRange range, const std::string& what) const;
  void copy_from(int rank, ByteRange range);
  void gather_from_other_nodes(std::uint64_t gather,
                               const OfRank& of_rank,
                               const std::string& what,
                               Deadline deadline);

  ChannelSpec spec_;
  const ChannelLayout layout_;
  const Group group_;
  const Nodes& nodes_;
  const std::vector<int>& local_;                         // ranks of this node
  const std::vector<std::shared_ptr<Segment>> segments_;  // by rank; null on other nodes
  ControlPlane& control_;
  const bool spin_;
  StagingPool pool_;
  std::unique_ptr<SliceMessages> slice_messages_;  // both null with one node
  std::unique_ptr<GatherMessages> gather_messages_;
  std::vector<kernels::Slice> slices_;  // of the fold at hand
  std::atomic<std::uint64_t> reduced_bytes_{0};
  std::atomic<std::uint64_t> gathered_bytes_{0};
  std::atomic<std::uint64_t> between_nodes_bytes_{0};
};

}  // namespace tandem::comm
