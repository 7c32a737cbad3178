#include "comm/staged_channel.h"

#include "comm/mark_wait.h"

#include <algorithm>
#include <utility>

namespace tandem::comm {

namespace {

/// A rank folds a post only when all have posted it, and so have folded the one before: at most two
/// posts are on the host at once.
constexpr std::size_t kHostPosts = 2;

}  // namespace

StagedChannel::StagedChannel(const ChannelSpec& spec,
                             std::shared_ptr<DeviceLink> link,
                             std::shared_ptr<std::byte> parameters,
                             DataPlane& host,
                             Deadline deadline)
    : DeviceChannel(spec, std::move(link), std::move(parameters)),
      piece_bytes_(piece_bytes(spec, group().size)) {
  ChannelSpec on_host = spec;
  on_host.staging_slots = kHostPosts;
  on_host.posts_in_flight = kHostPosts;
  on_host.folder = [this](std::span<const kernels::Slice> slices, std::int64_t numel, float* acc,
                          kernels::Accumulator state) { fold_up(slices, numel, acc, state); };
  host_ = host.open(on_host, deadline);
  mirror_ = host_->parameters();
}

StagedChannel::~StagedChannel() { link().retired().keep(mirror_, {copied_up_}); }

void StagedChannel::await(const kernels::Mark& mark, const std::string& what, Deadline deadline) {
  await_mark(
      mark, [this] { link().check(); }, {where(), what, group()}, deadline);
}

// --- reductions ---

Staging StagedChannel::copy_down(const Staging& staging,
                                 const std::string& what,
                                 Deadline deadline) {
  Staging below;
  {
    const std::lock_guard lock(host_staging_);
    below = host_->acquire(staging.bytes);
  }
  link().device().copy(link().stream(), below.data, staging.data, staging.bytes);
  await(link().stream().record(), what, deadline);  // Y1
  return below;
}

void StagedChannel::give_fold(const Post& post,
                              Sum sum,
                              const std::string& what,
                              Deadline deadline) {
  Staging below;
  if (post.staging) below = copy_down(post.staging, what, deadline);
  PostId posted = 0;
  {
    const std::lock_guard lock(host_staging_);
    posted = host_->post(std::move(below), post.wire,
                         [&](int rank) { return post.parts[static_cast<std::size_t>(rank)]; });
  }
  const ElementRange mine = post.parts[static_cast<std::size_t>(group().rank)];
  folding_ = Folding{&post, 0, &what, deadline};
  host_->fold(posted, mine.begin, mine.end - mine.begin, sum.acc, sum.state, what, deadline);
  folding_ = {};
}

void StagedChannel::fold_up(std::span<const kernels::Slice> slices,
                            std::int64_t numel,
                            float* acc,
                            kernels::Accumulator state) {
  const Scratch::Lease received(link().received());
  const Post& post = *folding_.post;
  const std::int64_t begin = post.parts[static_cast<std::size_t>(group().rank)].begin;
  const auto step = static_cast<std::int64_t>(piece_bytes_ / sizeof(float));
  kernels::Mark copied;
  for (std::int64_t at = 0; at < numel; at += step) {
    const std::int64_t piece = std::min(step, numel - at);
    std::vector<kernels::Slice> above;
    std::byte* place = received.data();
    for (std::size_t rank = 0; rank < slices.size(); ++rank) {
      kernels::Slice slice = slices[rank];
      const std::size_t element = kernels::bytes_of(slice.dtype);
      if (static_cast<int>(rank) == group().rank) {
        if (post.staging) {  // is there already
          slice.data =
              post.staging.data + static_cast<std::size_t>(begin + folding_.folded + at) * element;
        }
      } else if (slice.data != nullptr) {
        const auto* const from = static_cast<const std::byte*>(slice.data);
        link().device().copy(link().stream(), place, from + static_cast<std::size_t>(at) * element,
                             static_cast<std::size_t>(piece) * element);
        slice.data = place;
        place += piece_bytes_;
        count_reduced(static_cast<int>(rank), static_cast<std::size_t>(piece) * element);
      }
      above.push_back(slice);
    }
    copied = link().stream().record();
    link().device().fold(link().stream(), above, piece, acc + at, state);
  }
  folding_.folded += numel;
  await(copied, *folding_.what, folding_.deadline);  // Y1
}

void StagedChannel::trim(int idle_generations) {
  DeviceChannel::trim(idle_generations);
  const std::lock_guard lock(host_staging_);
  host_->trim(idle_generations);
}

std::size_t StagedChannel::staging_bytes() const {
  return DeviceChannel::staging_bytes() + host_->staging_bytes();
}

// --- parameters ---

void StagedChannel::give_gather(const Ranges& ranges, const std::string& what, Deadline deadline) {
  if (group().size == 1) return;
  const auto copy = [&](std::size_t rank, std::byte* to, const std::byte* from) {
    const ByteRange range = ranges[rank];
    if (range.begin == range.end) return;
    link().device().copy(link().stream(), to + range.begin, from + range.begin,
                         range.end - range.begin);
  };
  const auto me = static_cast<std::size_t>(group().rank);
  host_->wait_gathered_by_all(what, deadline);  // Y2
  copy(me, mirror_.get(), parameter_data());
  // The stream does this behind the last gather's copies from the mirror, so they are done, too.
  await(link().stream().record(), what, deadline);
  host_->gather(
      host_->post_gather({}), [&](int rank) { return ranges[static_cast<std::size_t>(rank)]; },
      what, deadline);
  for (std::size_t rank = 0; rank < ranges.size(); ++rank) {
    if (rank != me) copy(rank, parameter_data(), mirror_.get());
  }
  copied_up_ = link().stream().record();
}

}  // namespace tandem::comm
