#include "comm/shared_channel.h"

#include <tandem/error.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace tandem::comm {

/// Zeroed and constructed by the owner before its segment is shown to anyone.
struct SharedChannel::Head {
  alignas(64) Bell bell;
  alignas(64) std::atomic<std::uint64_t> posted{0};  // reductions posted so far
  std::atomic<std::uint64_t> folded{0};
  std::atomic<std::uint64_t> gather_posted{0};
  std::atomic<std::uint64_t> gathered{0};
};

/// One post: where its staging lies in the rank's segment; no bytes stand for zeros.
struct SharedChannel::Record {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t dtype = 0;
};

namespace {

constexpr std::size_t kHeadBytes = 256;
constexpr std::size_t kRecordBytes = 24;
constexpr int kSpins = 5;  // about as many microseconds

std::size_t to_pages(std::size_t bytes) {
  return (bytes + Segment::kPage - 1) / Segment::kPage * Segment::kPage;
}

}  // namespace

ChannelLayout::ChannelLayout(const ChannelSpec& spec) {
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 8;
  if (spec.parameter_bytes > kMost || spec.largest_staging > kMost ||
      spec.posts_in_flight > kMost / kRecordBytes || spec.staging_slots > kMost ||
      (spec.staging_slots != 0 && spec.largest_staging > kMost / spec.staging_slots)) {
    throw InvalidArgument("channel of engine '" + spec.name + "': sizes beyond address space");
  }
  ring = std::bit_ceil(spec.posts_in_flight + 1);
  parameters_at = to_pages(kHeadBytes + ring * kRecordBytes);
  staging_at = parameters_at + to_pages(spec.parameter_bytes);
  slot_bytes = to_pages(std::max<std::size_t>(spec.largest_staging, 1));
  segment_bytes = staging_at + spec.staging_slots * slot_bytes;
}

std::shared_ptr<Segment> SharedChannel::make_segment(const ChannelSpec& spec, Group group) {
  static_assert(sizeof(Head) <= kHeadBytes && sizeof(Record) == kRecordBytes);
  const ChannelLayout layout(spec);
  const auto segment = Segment::create(
      "engine '" + spec.name + "', rank " + std::to_string(group.rank), layout.segment_bytes);
  segment->commit(0, layout.staging_at);
  new (segment->data()) Head();
  return segment;
}

SharedChannel::SharedChannel(ChannelSpec spec,
                             Group group,
                             std::vector<std::shared_ptr<Segment>> segments,
                             ControlPlane& control)
    : spec_(std::move(spec)),
      layout_(spec_),
      group_(group),
      segments_(std::move(segments)),
      control_(control),
      spin_(may_spin(group.size)),
      pool_(spec_.name,
            segments_[static_cast<std::size_t>(group.rank)],
            layout_.staging_at,
            layout_.slot_bytes,
            spec_.staging_slots) {
  slices_.resize(static_cast<std::size_t>(group.size));
}

SharedChannel::Head& SharedChannel::head(int rank) const {
  return *reinterpret_cast<Head*>(segments_[static_cast<std::size_t>(rank)]->data());
}

SharedChannel::Record& SharedChannel::record(int rank, PostId post) const {
  std::byte* const ring = segments_[static_cast<std::size_t>(rank)]->data() + kHeadBytes;
  return reinterpret_cast<Record*>(ring)[post & (layout_.ring - 1)];
}

std::uint64_t SharedChannel::least(Counter counter) const {
  std::uint64_t value = std::numeric_limits<std::uint64_t>::max();
  for (int rank = 0; rank < group_.size; ++rank) {
    value = std::min(value, (head(rank).*counter).load(std::memory_order_acquire));
  }
  return value;
}

void SharedChannel::publish(Counter counter, std::uint64_t value) {
  Head& mine = head(group_.rank);
  (mine.*counter).store(value, std::memory_order_release);
  mine.bell.ring();
}

void SharedChannel::await(
    int rank, Counter counter, std::uint64_t target, const std::string& what, Deadline deadline) {
  Head& peer = head(rank);
  const auto arrived = [&] { return (peer.*counter).load(std::memory_order_acquire) >= target; };
  for (int spin = 0; spin_ && spin < kSpins && !arrived(); ++spin) spin_once();
  while (true) {
    const std::uint32_t seen = peer.bell.count();
    if (arrived()) return;
    // Looked at once a slice: an abort ends the wait at the next look at the latest.
    if (const auto text = control_.aborted()) throw WorldBroken(*text);
    if (deadline.passed()) time_out(counter, target, what);
    peer.bell.sleep(seen, deadline.at);
  }
}

void SharedChannel::time_out(Counter counter, std::uint64_t target, const std::string& what) const {
  std::string missing;
  for (int rank = 0; rank < group_.size; ++rank) {
    if ((head(rank).*counter).load(std::memory_order_acquire) >= target) continue;
    missing += (missing.empty() ? " " : ", ") + std::to_string(rank);
  }
  throw Timeout("engine '" + spec_.name + "': " + what + ": not finished by its deadline on rank " +
                std::to_string(group_.rank) + ", missing rank" + missing +
                "; if they are only slow, use a longer timeout, else restart from the last "
                "checkpoint");
}

Staging SharedChannel::acquire(std::size_t bytes) {
  pool_.free_folded(least(&Head::folded));
  return pool_.acquire(bytes);
}

void SharedChannel::give_back(Staging staging) { pool_.give_back(staging); }

PostId SharedChannel::post(Staging staging, kernels::Dtype wire) {
  const PostId post = head(group_.rank).posted.load(std::memory_order_relaxed);
  if (post - least(&Head::folded) >= layout_.ring) {
    throw InvalidArgument("channel of engine '" + spec_.name + "': more than " +
                          std::to_string(spec_.posts_in_flight) + " posts in flight");
  }
  Record& mine = record(group_.rank, post);
  mine = Record{};
  if (staging) {
    pool_.posted(staging, post);
    mine.offset = pool_.offset(staging);
    mine.bytes = staging.bytes;
    mine.dtype = static_cast<std::uint64_t>(wire);
  }
  publish(&Head::posted, post + 1);
  return post;
}

void SharedChannel::fold(PostId post,
                         std::int64_t begin,
                         std::int64_t numel,
                         float* acc,
                         kernels::Accumulator state,
                         const std::string& what,
                         Deadline deadline) {
  if (post != head(group_.rank).folded.load(std::memory_order_relaxed)) {
    throw InvalidArgument("engine '" + spec_.name + "': " + what + ": post " +
                          std::to_string(post) + " folded out of order");
  }
  std::uint64_t from_peers = 0;
  for (int rank = 0; rank < group_.size; ++rank) {
    await(rank, &Head::posted, post + 1, what, deadline);
    const Record& theirs = record(rank, post);
    kernels::Slice& slice = slices_[static_cast<std::size_t>(rank)];
    slice = kernels::Slice{};
    if (theirs.bytes == 0 || numel == 0) continue;
    slice.dtype = static_cast<kernels::Dtype>(theirs.dtype);
    const std::uint64_t element = kernels::bytes_of(slice.dtype);
    if (begin < 0 || static_cast<std::uint64_t>(begin + numel) > theirs.bytes / element) {
      throw Mismatch("engine '" + spec_.name + "': " + what + ": elements [" +
                     std::to_string(begin) + ", " + std::to_string(begin + numel) +
                     ") asked of a contribution of rank " + std::to_string(rank) + " that has " +
                     std::to_string(theirs.bytes / element) + " (D1)");
    }
    slice.data = segments_[static_cast<std::size_t>(rank)]->data() + theirs.offset +
                 static_cast<std::uint64_t>(begin) * element;
    if (rank != group_.rank) from_peers += static_cast<std::uint64_t>(numel) * element;
  }
  if (numel != 0) kernels::fold(slices_, numel, acc, state);
  reduced_bytes_.fetch_add(from_peers, std::memory_order_relaxed);
  publish(&Head::folded, post + 1);
}

bool SharedChannel::folded_by_all() const {
  return least(&Head::folded) >= head(group_.rank).posted.load(std::memory_order_relaxed);
}

void SharedChannel::wait_folded_by_all(const std::string& what, Deadline deadline) {
  const std::uint64_t target = head(group_.rank).posted.load(std::memory_order_acquire);
  for (int rank = 0; rank < group_.size; ++rank) {
    await(rank, &Head::folded, target, what, deadline);
  }
}

void SharedChannel::trim(int idle_generations) {
  pool_.free_folded(least(&Head::folded));
  pool_.trim(idle_generations);
}

std::shared_ptr<std::byte> SharedChannel::parameters() {
  const auto& mine = segments_[static_cast<std::size_t>(group_.rank)];
  return {mine, mine->data() + layout_.parameters_at};
}

std::uint64_t SharedChannel::post_gather() {
  const std::uint64_t gather = head(group_.rank).gather_posted.load(std::memory_order_relaxed);
  publish(&Head::gather_posted, gather + 1);
  return gather;
}

void SharedChannel::gather(std::uint64_t gather,
                           const std::function<ByteRange(int rank)>& of_rank,
                           const std::string& what,
                           Deadline deadline) {
  if (gather != head(group_.rank).gathered.load(std::memory_order_relaxed)) {
    throw InvalidArgument("engine '" + spec_.name + "': " + what + ": gather " +
                          std::to_string(gather) + " taken out of order");
  }
  std::byte* const mine =
      segments_[static_cast<std::size_t>(group_.rank)]->data() + layout_.parameters_at;
  // Each rank begins with its right neighbour, so that not all of them read the same rank at once.
  for (int step = 1; step < group_.size; ++step) {
    const int rank = (group_.rank + step) % group_.size;
    await(rank, &Head::gather_posted, gather + 1, what, deadline);
    const ByteRange range = of_rank(rank);
    if (range.begin > range.end || range.end > spec_.parameter_bytes) {
      throw InvalidArgument("engine '" + spec_.name + "': " + what + ": bytes [" +
                            std::to_string(range.begin) + ", " + std::to_string(range.end) +
                            ") of " + std::to_string(spec_.parameter_bytes));
    }
    if (range.begin == range.end) continue;
    const std::byte* const theirs =
        segments_[static_cast<std::size_t>(rank)]->data() + layout_.parameters_at;
    std::memcpy(mine + range.begin, theirs + range.begin, range.end - range.begin);
    gathered_bytes_.fetch_add(range.end - range.begin, std::memory_order_relaxed);
  }
  publish(&Head::gathered, gather + 1);
}

void SharedChannel::wait_gathered_by_all(const std::string& what, Deadline deadline) {
  const std::uint64_t target = head(group_.rank).gather_posted.load(std::memory_order_acquire);
  for (int rank = 0; rank < group_.size; ++rank) {
    await(rank, &Head::gathered, target, what, deadline);
  }
}

}  // namespace tandem::comm
