#include "comm/nccl_channel.h"

#include <algorithm>
#include <utility>

namespace tandem::comm {

NcclLink::NcclLink(const DeviceLinks& links,
                   std::unique_ptr<Nccl> nccl,
                   std::unique_ptr<NcclCommunicator> communicator)
    : DeviceLink(links), nccl_(std::move(nccl)), communicator_(std::move(communicator)) {}

void NcclLink::check() {
  DeviceLink::check();
  if (communicator_ != nullptr) communicator_->check();
}

void NcclLink::abort() noexcept {
  DeviceLink::abort();
  if (communicator_ != nullptr) communicator_->abort();
}

NcclChannel::NcclChannel(const ChannelSpec& spec,
                         std::shared_ptr<NcclLink> link,
                         std::shared_ptr<std::byte> parameters)
    : DeviceChannel(spec, link, std::move(parameters)),
      nccl_(std::move(link)),
      piece_bytes_(piece_bytes(spec, group().size)) {}

// --- reductions ---

ElementRange NcclChannel::piece_of(const Post& post, int rank, std::int64_t at) const {
  const ElementRange part = post.parts[static_cast<std::size_t>(rank)];
  const auto most = static_cast<std::int64_t>(piece_bytes_ / kernels::bytes_of(post.wire));
  const std::int64_t begin = std::min(part.begin + at, part.end);
  return {begin, std::min(begin + most, part.end)};
}

std::byte* NcclChannel::place_of(std::byte* received, int peer) const {
  const int index = peer < group().rank ? peer : peer - 1;
  return received + static_cast<std::size_t>(index) * piece_bytes_;
}

void NcclChannel::exchange(
    const Post& post, std::int64_t at, std::byte* received, std::byte* zeros, Deadline deadline) {
  NcclCommunicator& communicator = nccl_->communicator();
  const ElementRange mine = piece_of(post, group().rank, at);
  const std::size_t element = kernels::bytes_of(post.wire);
  communicator.group_start();
  for (int peer = 0; peer < group().size; ++peer) {
    if (peer == group().rank) continue;
    const ElementRange theirs = piece_of(post, peer, at);
    if (theirs.begin != theirs.end) {
      const std::byte* const data =
          post.staging ? post.staging.data + static_cast<std::size_t>(theirs.begin) * element
                       : zeros;
      communicator.send(data, static_cast<std::size_t>(theirs.end - theirs.begin), post.wire, peer,
                        link().stream());
    }
    if (mine.begin != mine.end) {
      communicator.receive(place_of(received, peer),
                           static_cast<std::size_t>(mine.end - mine.begin), post.wire, peer,
                           link().stream());
      count_reduced(peer, static_cast<std::size_t>(mine.end - mine.begin) * element);
    }
  }
  communicator.group_end(deadline);
}

void NcclChannel::give_fold(const Post& post,
                            Sum sum,
                            const std::string& /*what*/,
                            Deadline deadline) {
  const Scratch::Lease received(link().received());
  const Scratch::Lease zeros(link().zeros());
  const std::size_t element = kernels::bytes_of(post.wire);
  const ElementRange part = post.parts[static_cast<std::size_t>(group().rank)];
  // As many pieces on every rank as the longest part has.
  std::int64_t longest = 0;
  for (const ElementRange& theirs : post.parts) {
    longest = std::max(longest, theirs.end - theirs.begin);
  }
  const auto step = static_cast<std::int64_t>(piece_bytes_ / element);
  for (std::int64_t at = 0; at < longest; at += step) {
    if (group().size > 1) exchange(post, at, received.data(), zeros.data(), deadline);
    const ElementRange mine = piece_of(post, group().rank, at);
    if (mine.begin == mine.end) continue;
    std::vector<kernels::Slice> slices;
    for (int rank = 0; rank < group().size; ++rank) {
      const std::byte* data = rank == group().rank ? nullptr : place_of(received.data(), rank);
      if (rank == group().rank && post.staging) {
        data = post.staging.data + static_cast<std::size_t>(mine.begin) * element;
      }
      slices.push_back(kernels::Slice{data, post.wire});
    }
    link().device().fold(link().stream(), slices, mine.end - mine.begin,
                         sum.acc + (mine.begin - part.begin), sum.state);
  }
}

// --- parameters ---

void NcclChannel::give_gather(const Ranges& ranges,
                              const std::string& /*what*/,
                              Deadline deadline) {
  const auto bytes_of = [&](std::size_t rank) { return ranges[rank].end - ranges[rank].begin; };
  std::size_t all = 0;
  bool in_a_row = true;
  for (std::size_t rank = 0; rank < ranges.size(); ++rank) {
    all += bytes_of(rank);
    in_a_row = in_a_row && ranges[rank].begin == ranges[0].begin + rank * bytes_of(0) &&
               bytes_of(rank) == bytes_of(0);
  }
  if (group().size == 1 || all == 0) return;
  NcclCommunicator& communicator = nccl_->communicator();
  communicator.group_start();
  if (in_a_row) {
    const ByteRange mine = ranges[static_cast<std::size_t>(group().rank)];
    communicator.all_gather(parameter_data() + mine.begin, parameter_data() + ranges[0].begin,
                            bytes_of(0), link().stream());
  } else {
    for (std::size_t rank = 0; rank < ranges.size(); ++rank) {
      if (bytes_of(rank) == 0) continue;
      communicator.broadcast(parameter_data() + ranges[rank].begin, bytes_of(rank),
                             static_cast<int>(rank), link().stream());
    }
  }
  communicator.group_end(deadline);
}

}  // namespace tandem::comm
