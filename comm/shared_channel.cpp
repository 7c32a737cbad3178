#include "comm/shared_channel.h"

#include "comm/pacer.h"
#include <tandem/error.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <thread>
#include <utility>

namespace tandem::comm {

/// Zeroed and constructed by the owner before its segment is shown to anyone.
struct SharedChannel::Head {
  alignas(64) Bell bell;
  alignas(64) std::atomic<std::uint64_t> posted{0};  // reductions posted so far
  std::atomic<std::uint64_t> folded{0};
  std::atomic<std::uint64_t> gather_posted{0};
  std::atomic<std::uint64_t> relayed{0};  // gathers whose parts from other nodes are here
  std::atomic<std::uint64_t> gathered{0};
};

/// One post: where its staging lies in the rank's segment; no bytes stand for zeros.
struct SharedChannel::Record {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t dtype = 0;
};

namespace {

constexpr int kSpins = 5;  // about as many microseconds
// How long messages are looked at without a pause while their data flow.
constexpr std::chrono::microseconds kBurst{100};
// Elements folded between two looks at messages of the next bucket: about 0.1 ms.
constexpr std::int64_t kFoldPiece = 256 * 1024;

}  // namespace

std::shared_ptr<Segment> SharedChannel::make_segment(const ChannelSpec& spec,
                                                     int rank,
                                                     const Nodes& nodes) {
  static_assert(sizeof(Head) <= ChannelLayout::kHeadBytes &&
                sizeof(Record) == ChannelLayout::kRecordBytes);
  const ChannelLayout layout(spec);
  const auto segment = Segment::create("engine '" + spec.name + "', rank " + std::to_string(rank),
                                       layout.segment_bytes);
  const bool elsewhere = spec.share_parameters && !nodes.is_first(rank);
  segment->commit(0, elsewhere ? layout.parameters_at : layout.staging_at);
  new (segment->data()) Head();
  return segment;
}

SharedChannel::SharedChannel(ChannelSpec spec,
                             Group group,
                             const Nodes& nodes,
                             std::vector<std::shared_ptr<Segment>> segments,
                             BetweenNodes messengers,
                             ControlPlane& control)
    : spec_(std::move(spec)),
      layout_(spec_),
      group_(group),
      nodes_(nodes),
      local_(nodes.ranks_of(nodes.node_of(group.rank))),
      segments_(std::move(segments)),
      control_(control),
      spin_(may_spin(group.size)),
      pool_(spec_.name,
            segments_[static_cast<std::size_t>(group.rank)],
            layout_.staging_at,
            layout_.slot_bytes,
            spec_.staging_slots) {
  slices_.resize(static_cast<std::size_t>(group.size));
  if (!spec_.folder) spec_.folder = kernels::fold;
  if (messengers.slices != nullptr) {
    slice_messages_ =
        std::make_unique<SliceMessages>(nodes, group.rank, std::move(messengers.slices));
    gather_messages_ =
        std::make_unique<GatherMessages>(nodes, group.rank, std::move(messengers.parameters));
  }
}

SharedChannel::Head& SharedChannel::head(int rank) const {
  return *reinterpret_cast<Head*>(segments_[static_cast<std::size_t>(rank)]->data());
}

SharedChannel::Record& SharedChannel::record(int rank, PostId post) const {
  std::byte* const ring =
      segments_[static_cast<std::size_t>(rank)]->data() + ChannelLayout::kHeadBytes;
  return reinterpret_cast<Record*>(ring)[post & (layout_.ring - 1)];
}

std::byte* SharedChannel::parameters_of(int rank) const {
  const int owner = spec_.share_parameters ? local_.front() : rank;
  return segments_[static_cast<std::size_t>(owner)]->data() + layout_.parameters_at;
}

std::uint64_t SharedChannel::least(Counter counter) const {
  std::uint64_t value = std::numeric_limits<std::uint64_t>::max();
  for (const int rank : local_) {
    value = std::min(value, (head(rank).*counter).load(std::memory_order_acquire));
  }
  return value;
}

std::vector<int> SharedChannel::behind(Counter counter, std::uint64_t target) const {
  std::vector<int> ranks;
  for (const int rank : local_) {
    if ((head(rank).*counter).load(std::memory_order_acquire) < target) ranks.push_back(rank);
  }
  return ranks;
}

void SharedChannel::publish(Counter counter, std::uint64_t value) {
  Head& mine = head(group_.rank);
  (mine.*counter).store(value, std::memory_order_release);
  mine.bell.ring();
}

// --- waiting ---

void SharedChannel::await(
    int rank, Counter counter, std::uint64_t target, const std::string& what, Deadline deadline) {
  Head& peer = head(rank);
  const auto arrived = [&] { return (peer.*counter).load(std::memory_order_acquire) >= target; };
  if (slice_messages_) {
    await_messages([&] { return arrived() ? std::vector<int>() : behind(counter, target); }, what,
                   deadline);
    return;
  }
  for (int spin = 0; spin_ && spin < kSpins && !arrived(); ++spin) spin_once();
  while (true) {
    const std::uint32_t seen = peer.bell.count();
    if (arrived()) return;
    // Looked at once a slice: an abort ends the wait at the next look at the latest.
    if (const auto text = control_.aborted()) throw WorldBroken(*text);
    if (deadline.passed()) time_out(behind(counter, target), what);
    peer.bell.sleep(seen, deadline.at);
  }
}

void SharedChannel::await_all(Counter counter,
                              std::uint64_t target,
                              const std::string& what,
                              Deadline deadline) {
  for (const int rank : local_) await(rank, counter, target, what, deadline);
}

void SharedChannel::await_messages(const std::function<std::vector<int>()>& missing,
                                   const std::string& what,
                                   Deadline deadline) {
  Pacer pacer;
  for (;;) {
    const auto begin = Clock::now();
    while (true) {
      const Traffic slices = slice_messages_->progress();
      const Traffic parts = gather_messages_->progress();
      const std::vector<int> ranks = missing();
      if (ranks.empty()) return;
      if (deadline.passed()) time_out(ranks, what);
      // Data flow only while somebody looks, a piece at a look.
      const bool flows = slices.receiving || parts.receiving;
      if (flows) pacer.reset();
      const bool may_flow = (slices.sending || parts.sending) && pacer.eager();
      if (!(flows || may_flow) || Clock::now() - begin > kBurst) break;
    }
    if (const auto text = control_.aborted()) throw WorldBroken(*text);
    std::this_thread::sleep_for(pacer.pause());
  }
}

void SharedChannel::time_out(const std::vector<int>& missing, const std::string& what) const {
  std::string ranks;
  for (const int rank : missing) ranks += (ranks.empty() ? " " : ", ") + std::to_string(rank);
  throw Timeout("engine '" + spec_.name + "': " + what + ": not finished by its deadline on rank " +
                std::to_string(group_.rank) + ", missing rank" + ranks +
                "; if they are only slow, use a longer timeout, else restart from the last "
                "checkpoint");
}

// --- reductions ---

Staging SharedChannel::acquire(std::size_t bytes) {
  pool_.free_folded(settled());
  return pool_.acquire(bytes);
}

void SharedChannel::give_back(Staging staging) { pool_.give_back(staging); }

PostId SharedChannel::post(Staging staging, kernels::Dtype wire, const PartOfRank& part) {
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
  if (slice_messages_) {
    slice_messages_->post(staging.data, staging.bytes, wire, part,
                          segments_[static_cast<std::size_t>(group_.rank)]);
  }
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
  if (slice_messages_) {
    const auto missing = [&] {
      std::vector<int> ranks = behind(&Head::posted, post + 1);
      const std::vector<int> far = slice_messages_->not_received();
      ranks.insert(ranks.end(), far.begin(), far.end());
      std::sort(ranks.begin(), ranks.end());
      return ranks;
    };
    await_messages(missing, what, deadline);
  }
  std::uint64_t from_peers = 0;
  std::uint64_t from_far = 0;
  for (int rank = 0; rank < group_.size; ++rank) {
    const bool near = nodes_.together(rank, group_.rank);
    if (near && !slice_messages_) await(rank, &Head::posted, post + 1, what, deadline);
    kernels::Slice& slice = slices_[static_cast<std::size_t>(rank)];
    slice = slice_of(rank, post, begin, numel, what);
    if (slice.data == nullptr || rank == group_.rank) continue;
    const std::uint64_t bytes = static_cast<std::uint64_t>(numel) * kernels::bytes_of(slice.dtype);
    from_peers += bytes;
    if (!near) from_far += bytes;
  }
  fold_slices(numel, acc, state);
  reduced_bytes_.fetch_add(from_peers, std::memory_order_relaxed);
  between_nodes_bytes_.fetch_add(from_far, std::memory_order_relaxed);
  if (slice_messages_) slice_messages_->release();
  publish(&Head::folded, post + 1);
  if (slice_messages_) {  // H4
    await_messages([&] { return slice_messages_->not_sent(post + 1); }, what, deadline);
  }
}

kernels::Slice SharedChannel::slice_of(
    int rank, PostId post, std::int64_t begin, std::int64_t numel, const std::string& what) const {
  const auto refuse = [&](std::uint64_t elements) {
    throw Mismatch("engine '" + spec_.name + "': " + what + ": elements [" + std::to_string(begin) +
                   ", " + std::to_string(begin + numel) + ") asked of a contribution of rank " +
                   std::to_string(rank) + " that has " + std::to_string(elements) + " (D1)");
  };
  if (numel == 0) return {};
  if (!nodes_.together(rank, group_.rank)) {
    const SliceMessages::Part part = slice_messages_->part_of(rank);
    if (part.bytes == 0) return {};
    const std::uint64_t elements = part.bytes / kernels::bytes_of(part.wire);
    if (elements != static_cast<std::uint64_t>(numel)) refuse(elements);
    return kernels::Slice{part.data, part.wire};
  }
  const Record& theirs = record(rank, post);
  if (theirs.bytes == 0) return {};
  const auto dtype = static_cast<kernels::Dtype>(theirs.dtype);
  const std::uint64_t element = kernels::bytes_of(dtype);
  if (begin < 0 || static_cast<std::uint64_t>(begin + numel) > theirs.bytes / element) {
    refuse(theirs.bytes / element);
  }
  return kernels::Slice{segments_[static_cast<std::size_t>(rank)]->data() + theirs.offset +
                            static_cast<std::uint64_t>(begin) * element,
                        dtype};
}

void SharedChannel::fold_slices(std::int64_t numel, float* acc, kernels::Accumulator state) {
  if (!slice_messages_) {
    if (numel != 0) spec_.folder(slices_, numel, acc, state);
    return;
  }
  // In pieces (fold.h F1), between which the next bucket's messages move on.
  for (std::int64_t at = 0; at < numel; at += kFoldPiece) {
    const std::int64_t piece = std::min(kFoldPiece, numel - at);
    spec_.folder(slices_, piece, acc + at, state);
    for (kernels::Slice& slice : slices_) {
      if (slice.data == nullptr) continue;
      slice.data = static_cast<const std::byte*>(slice.data) +
                   static_cast<std::size_t>(piece) * kernels::bytes_of(slice.dtype);
    }
    static_cast<void>(slice_messages_->progress());
  }
}

PostId SharedChannel::settled() const {
  const PostId folded = least(&Head::folded);
  return slice_messages_ ? std::min(folded, slice_messages_->sent()) : folded;
}

bool SharedChannel::folded_by_all() const {
  if (slice_messages_) static_cast<void>(slice_messages_->progress());
  return settled() >= head(group_.rank).posted.load(std::memory_order_relaxed);
}

void SharedChannel::wait_folded_by_all(const std::string& what, Deadline deadline) {
  const std::uint64_t target = head(group_.rank).posted.load(std::memory_order_acquire);
  await_all(&Head::folded, target, what, deadline);
  if (slice_messages_) {
    await_messages([&] { return slice_messages_->not_sent(target); }, what, deadline);
  }
}

void SharedChannel::trim(int idle_generations) {
  pool_.free_folded(settled());
  pool_.trim(idle_generations);
  if (slice_messages_) slice_messages_->trim(idle_generations);
}

std::size_t SharedChannel::staging_bytes() const {
  return pool_.committed_bytes() + (slice_messages_ ? slice_messages_->buffer_bytes() : 0);
}

// --- parameters ---

std::shared_ptr<std::byte> SharedChannel::parameters() {
  const int owner = spec_.share_parameters ? local_.front() : group_.rank;
  return {segments_[static_cast<std::size_t>(owner)], parameters_of(group_.rank)};
}

std::uint64_t SharedChannel::post_gather(const kernels::Marks& /*written*/) {
  const std::uint64_t gather = head(group_.rank).gather_posted.load(std::memory_order_relaxed);
  publish(&Head::gather_posted, gather + 1);
  return gather;
}

ByteRange SharedChannel::checked(ByteRange range, const std::string& what) const {
  if (range.begin > range.end || range.end > spec_.parameter_bytes) {
    throw InvalidArgument("engine '" + spec_.name + "': " + what + ": bytes [" +
                          std::to_string(range.begin) + ", " + std::to_string(range.end) + ") of " +
                          std::to_string(spec_.parameter_bytes));
  }
  return range;
}

void SharedChannel::copy_from(int rank, ByteRange range) {
  if (spec_.share_parameters || range.begin == range.end) return;
  std::memcpy(parameters_of(group_.rank) + range.begin, parameters_of(rank) + range.begin,
              range.end - range.begin);
  gathered_bytes_.fetch_add(range.end - range.begin, std::memory_order_relaxed);
}

void SharedChannel::gather(std::uint64_t gather,
                           const std::function<ByteRange(int rank)>& of_rank,
                           const std::string& what,
                           Deadline deadline) {
  if (gather != head(group_.rank).gathered.load(std::memory_order_relaxed)) {
    throw InvalidArgument("engine '" + spec_.name + "': " + what + ": gather " +
                          std::to_string(gather) + " taken out of order");
  }
  if (gather_messages_) {
    gather_messages_->begin_sending(checked(of_rank(group_.rank), what), parameters_of(group_.rank),
                                    parameters());
  }
  // Each rank begins with its right neighbour, so that not all of them read the same rank at once.
  const auto me = std::find(local_.begin(), local_.end(), group_.rank) - local_.begin();
  for (std::size_t step = 1; step < local_.size(); ++step) {
    const int rank = local_[(static_cast<std::size_t>(me) + step) % local_.size()];
    await(rank, &Head::gather_posted, gather + 1, what, deadline);
    copy_from(rank, checked(of_rank(rank), what));
  }
  if (gather_messages_) gather_from_other_nodes(gather, of_rank, what, deadline);
  publish(&Head::gathered, gather + 1);
}

void SharedChannel::gather_from_other_nodes(std::uint64_t gather,
                                            const OfRank& of_rank,
                                            const std::string& what,
                                            Deadline deadline) {
  const std::size_t bytes =
      gather_messages_->begin_receiving([&](int rank) { return checked(of_rank(rank), what); },
                                        parameters_of(group_.rank), parameters());
  await_messages([&] { return gather_messages_->not_received(); }, what, deadline);
  gathered_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  between_nodes_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  publish(&Head::relayed, gather + 1);
  for (int source = 0; source < group_.size; ++source) {
    if (nodes_.together(source, group_.rank)) continue;
    const int relay = nodes_.relay(source, nodes_.node_of(group_.rank));
    const ByteRange range = of_rank(source);
    if (relay == group_.rank || range.begin == range.end) continue;
    await(relay, &Head::relayed, gather + 1, what, deadline);
    copy_from(relay, range);
  }
  await_messages([&] { return gather_messages_->not_sent(); }, what, deadline);  // H4
}

void SharedChannel::wait_gathered_by_all(const std::string& what, Deadline deadline) {
  const std::uint64_t target = head(group_.rank).gather_posted.load(std::memory_order_acquire);
  await_all(&Head::gathered, target, what, deadline);
}

}  // namespace tandem::comm
