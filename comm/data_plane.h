// comm/data_plane.h: the large transfers of one engine: reductions of its gradient buckets and the
// gathering of its parameters.
//
// D1 The k-th post on a channel is the same bucket, with the same element count, on every rank; the
//    caller (engine/sequencer) guarantees the order.
// D2 Staging handed to post() belongs to the channel until every rank of the node has folded that
//    post and the ranks of other nodes have received their slices; it is then reused by acquire().
//    Nothing is folded from staging that may be overwritten.
// D3 fold() adds the ranks' slices in rank order (kernels/fold.h F2).
// D4 Every wait has a deadline and ends at once when the world is aborted.
// D5 On a device's plane, fold, gather and broadcast are given to its stream and return; what they
//    read is waited for there (Staging::pending, post_gather), and a mark recorded on the stream
//    afterwards says when they are done. On the CPU's plane they are done when they return.
// Thread safety: acquire, post and folded_by_all may be called from any thread, one at a time (the
// caller's lock); fold, gather and broadcast run on the queue's thread or the step's, one at a
// time. Called by zero (flat parameters, gradient buckets) and engine.
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "kernels/dtype.h"
#include "kernels/fold.h"
#include "kernels/stream.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace tandem::comm {

using PostId = std::uint64_t;  // from 0, counts the posts of one channel

/// A piece of staging memory, [bytes], 64-byte aligned, contents undefined.
struct Staging {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::int32_t slot = -1;
  /// Work on streams that may still use the memory: from acquire(), what its next writer waits for;
  /// given to post() and give_back(), what that writer did. Empty on the CPU.
  kernels::Marks pending = {};

  explicit operator bool() const { return data != nullptr; }
};

/// Half-open byte range.
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

/// Half-open range of elements.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Which elements of a post each rank folds; the same on all ranks, and what fold() is given.
using PartOfRank = std::function<ElementRange(int rank)>;

/// Adds slices that lie on the host to acc[0, numel); they stay there until it returns.
using Folder = std::function<void(std::span<const kernels::Slice> slices,
                                  std::int64_t numel,
                                  float* acc,
                                  kernels::Accumulator state)>;

struct ChannelSpec {
  std::string name;                 // the engine's, for errors
  std::size_t parameter_bytes = 0;  // flat memory that gather() and broadcast() act on
  std::size_t largest_staging = 0;  // bytes of the largest acquire()
  std::size_t staging_slots = 0;    // most slots held or in flight at once
  std::size_t posts_in_flight = 0;  // most posts not folded by all ranks at once
  /// The ranks of a node have one parameter memory instead of one each (the same on all ranks). Who
  /// writes into it knows by an agreement of its own that no rank of the node reads.
  bool share_parameters = false;
  /// What adds the slices on this rank if not kernels::fold, for accumulators that lie elsewhere.
  /// Called by fold(), with one stretch of its elements after another. The host's plane only.
  Folder folder = {};
};

/// All that ranks must agree on, for errors.
[[nodiscard]] std::string describe(const ChannelSpec& spec);

class Channel {
 public:
  virtual ~Channel() = default;

  [[nodiscard]] virtual Group group() const = 0;

  // --- reductions ---
  /// Staging of at least `bytes`, preferring memory touched before. Throws OutOfMemory (with
  /// advice) and never blocks: the caller keeps within ChannelSpec::staging_slots.
  virtual Staging acquire(std::size_t bytes) = 0;
  /// Gives staging back that was never posted (a discarded window).
  virtual void give_back(Staging staging) = 0;
  /// Publishes this rank's contribution to its next reduction: `staging` holds elements of `wire`;
  /// empty staging stands for zeros. `part`: what to send to ranks of other nodes; not kept. Never
  /// blocks. The staging is the channel's from here on.
  virtual PostId post(Staging staging, kernels::Dtype wire, const PartOfRank& part) = 0;
  /// Waits until every rank has posted `post`, then adds elements [begin, begin + numel) of all
  /// contributions, in rank order, to acc[0, numel) (see kernels/fold.h), then marks this rank's
  /// fold of `post` as done, and waits until the ranks of other nodes have received what this rank
  /// posted. Posts must be folded in order, channels' folds in the same order on all ranks. numel 0
  /// is allowed (still waits, marks). Throws Timeout naming the channel, `what` and the missing
  /// ranks; WorldBroken after an abort.
  virtual void fold(PostId post,
                    std::int64_t begin,
                    std::int64_t numel,
                    float* acc,
                    kernels::Accumulator state,
                    const std::string& what,
                    Deadline deadline) = 0;
  /// True when staging of every post made so far on this rank may be reused (D2).
  [[nodiscard]] virtual bool folded_by_all() const = 0;
  /// Blocks until then. Throws as fold().
  virtual void wait_folded_by_all(const std::string& what, Deadline deadline) = 0;
  /// Releases pages of free staging slots that have not been used for `idle_generations` calls.
  virtual void trim(int idle_generations) = 0;

  // --- parameters ---
  /// This rank's flat parameter memory, [parameter_bytes], 64-byte aligned, read by the node; with
  /// share_parameters the node's. Kept alive by the returned pointer (tensors may outlive the
  /// channel).
  [[nodiscard]] virtual std::shared_ptr<std::byte> parameters() = 0;
  /// Says that this rank has written its part for the next gather; with share_parameters also that
  /// it reads nothing of what others gather until its gather() returns. Never blocks.
  /// `written`: the work that writes it, where it is on streams.
  virtual std::uint64_t post_gather(const kernels::Marks& written) = 0;
  /// For each peer r in turn: waits for its post of `gather`, then copies its bytes `of_rank(r)` to
  /// the same place here. A part from another node comes to the node once, to one of its ranks,
  /// from which the others copy it. With share_parameters nothing is copied inside a node: this
  /// waits until all parts are there. Marks this rank's copying of `gather` as done. Gathers are
  /// taken in order; `of_rank` is the same on all ranks.
  virtual void gather(std::uint64_t gather,
                      const std::function<ByteRange(int rank)>& of_rank,
                      const std::string& what,
                      Deadline deadline) = 0;
  /// Blocks until every rank of the node has taken every gather posted so far, so that parameter
  /// memory may be written again. (Ranks of other nodes have what gather() sent them.)
  virtual void wait_gathered_by_all(const std::string& what, Deadline deadline) = 0;

  // --- accounting ---
  /// Committed on this rank, buffers for messages included.
  [[nodiscard]] virtual std::size_t staging_bytes() const = 0;
  [[nodiscard]] virtual std::uint64_t reduced_bytes() const = 0;   // read from peers so far
  [[nodiscard]] virtual std::uint64_t gathered_bytes() const = 0;  // read from peers so far
  /// Of both, what came from other nodes.
  [[nodiscard]] virtual std::uint64_t between_nodes_bytes() const = 0;
};

class DataPlane {
 public:
  virtual ~DataPlane() = default;
  /// Collective. Throws OutOfMemory, SystemError, Timeout: the same on all ranks.
  virtual std::unique_ptr<Channel> open(const ChannelSpec& spec, Deadline deadline) = 0;
  /// Throws what has failed of the work under way, DeviceError or WorldBroken; nothing if all is
  /// well. For those who wait on marks.
  virtual void check() = 0;
  /// Ends the work under way on the stream as it is, so that its marks complete: a rank is gone or
  /// late. The plane serves nothing afterwards. Nothing to end on the CPU.
  virtual void abort() noexcept = 0;
};

}  // namespace tandem::comm
