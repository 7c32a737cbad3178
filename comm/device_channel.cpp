#include "comm/device_channel.h"

#include "comm/mark_wait.h"
#include <tandem/error.h>

#include <algorithm>
#include <utility>

namespace tandem::comm {

DeviceChannel::DeviceChannel(ChannelSpec spec,
                             std::shared_ptr<DeviceLink> link,
                             std::shared_ptr<std::byte> parameters)
    : spec_(std::move(spec)),
      where_("engine '" + spec_.name + "'"),
      link_(std::move(link)),
      parameters_(std::move(parameters)),
      pool_(spec_, link_->device(), link_->retired()) {}

// Tensors may have let the parameters go before, so a gather under way has them from here.
DeviceChannel::~DeviceChannel() {
  kernels::Marks last;
  try {
    last.push_back(link_->stream().record());
  } catch (...) {  // a device that has failed uses nothing any more
  }
  for (const kernels::Marks& written : gathers_) {
    last.insert(last.end(), written.begin(), written.end());
  }
  pool_.retire(last);
  link_->retired().keep(parameters_, last);
  link_->retired().sweep();
}

void DeviceChannel::count(Counter& counter, int from, std::size_t bytes) {
  if (from == group().rank) return;
  counter += bytes;
  if (!link_->nodes().together(from, group().rank)) between_nodes_bytes_ += bytes;
}

// --- reductions ---

Staging DeviceChannel::acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return pool_.acquire(bytes);
}

void DeviceChannel::give_back(Staging staging) {
  const std::lock_guard lock(mutex_);
  pool_.give_back(std::move(staging));
}

PostId DeviceChannel::post(Staging staging, kernels::Dtype wire, const PartOfRank& part) {
  Post made{std::move(staging), wire, {}};
  const std::uint64_t elements = made.staging.bytes / kernels::bytes_of(wire);
  for (int rank = 0; rank < group().size; ++rank) {
    const ElementRange range = part(rank);
    const bool inside = !made.staging || static_cast<std::uint64_t>(range.end) <= elements;
    if (range.begin < 0 || range.end < range.begin || !inside) {
      throw InvalidArgument(where_ + ": elements [" + std::to_string(range.begin) + ", " +
                            std::to_string(range.end) + ") for rank " + std::to_string(rank) +
                            " of a post of " + std::to_string(elements));
    }
    made.parts.push_back(range);
  }
  const std::lock_guard lock(mutex_);
  if (made.staging) pool_.posted(made.staging);
  posts_.push_back(std::move(made));
  return posted_++;
}

DeviceChannel::Post DeviceChannel::take_post(PostId post,
                                             std::int64_t begin,
                                             std::int64_t numel,
                                             const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (post != folds_taken_ || posts_.empty()) {
    throw InvalidArgument(where_ + ": " + what + ": post " + std::to_string(post) +
                          " folded out of order, or never made");
  }
  const ElementRange mine = posts_.front().parts[static_cast<std::size_t>(group().rank)];
  if (mine.end - mine.begin != numel || (numel != 0 && mine.begin != begin)) {
    throw Mismatch(where_ + ": " + what + ": elements [" + std::to_string(begin) + ", " +
                   std::to_string(begin + numel) + ") folded of a post whose part for rank " +
                   std::to_string(group().rank) + " is [" + std::to_string(mine.begin) + ", " +
                   std::to_string(mine.end) + ") (D1)");
  }
  ++folds_taken_;
  Post taken = std::move(posts_.front());
  posts_.pop_front();
  return taken;
}

void DeviceChannel::fold(PostId post,
                         std::int64_t begin,
                         std::int64_t numel,
                         float* acc,
                         kernels::Accumulator state,
                         const std::string& what,
                         Deadline deadline) {
  link_->check();
  const Post taken = take_post(post, begin, numel, what);
  link_->stream().wait(taken.staging.pending);
  give_fold(taken, Sum{acc, state}, what, deadline);
  kernels::Mark folded;
  if (taken.staging) folded = link_->stream().record();
  {
    const std::lock_guard lock(mutex_);
    if (taken.staging) pool_.folded(taken.staging.slot, std::move(folded));
    ++folds_given_;
  }
  given_.notify_all();
}

bool DeviceChannel::folded_by_all() const {
  const std::lock_guard lock(mutex_);
  return folds_given_ == posted_;
}

void DeviceChannel::wait_folded_by_all(const std::string& what, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = posted_;
  lock.unlock();
  await_given(folds_given_, target, what, deadline);
}

void DeviceChannel::await_given(const std::uint64_t& given,
                                std::uint64_t target,
                                const std::string& what,
                                Deadline deadline) {
  constexpr std::chrono::milliseconds kBetweenChecks{1};
  std::unique_lock lock(mutex_);
  while (given < target) {
    const auto until = std::min(deadline.at, Clock::now() + kBetweenChecks);
    if (given_.wait_until(lock, until, [&] { return given >= target; })) return;
    lock.unlock();
    link_->check();
    if (deadline.passed()) time_out({where_, what, group()});
    lock.lock();
  }
}

void DeviceChannel::trim(int idle_generations) {
  link_->retired().sweep();
  const std::lock_guard lock(mutex_);
  pool_.trim(idle_generations);
}

// --- parameters ---

std::uint64_t DeviceChannel::post_gather(const kernels::Marks& written) {
  const std::lock_guard lock(mutex_);
  gathers_.push_back(written);
  return gathers_posted_++;
}

kernels::Marks DeviceChannel::take_gather(std::uint64_t gather, const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (gather != gathers_taken_ || gathers_.empty()) {
    throw InvalidArgument(where_ + ": " + what + ": gather " + std::to_string(gather) +
                          " taken out of order, or never posted");
  }
  ++gathers_taken_;
  kernels::Marks written = std::move(gathers_.front());
  gathers_.pop_front();
  return written;
}

void DeviceChannel::gather(std::uint64_t gather,
                           const std::function<ByteRange(int rank)>& of_rank,
                           const std::string& what,
                           Deadline deadline) {
  link_->check();
  Ranges ranges;
  for (int rank = 0; rank < group().size; ++rank) {
    const ByteRange range = of_rank(rank);
    if (range.begin > range.end || range.end > spec_.parameter_bytes) {
      throw InvalidArgument(where_ + ": " + what + ": bytes [" + std::to_string(range.begin) +
                            ", " + std::to_string(range.end) + ") of " +
                            std::to_string(spec_.parameter_bytes));
    }
    ranges.push_back(range);
  }
  link_->stream().wait(take_gather(gather, what));
  give_gather(ranges, what, deadline);
  for (int rank = 0; rank < group().size; ++rank) {
    const ByteRange range = ranges[static_cast<std::size_t>(rank)];
    count_gathered(rank, range.end - range.begin);
  }
  {
    const std::lock_guard lock(mutex_);
    ++gathers_given_;
  }
  given_.notify_all();
}

void DeviceChannel::wait_gathered_by_all(const std::string& what, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t target = gathers_posted_;
  lock.unlock();
  await_given(gathers_given_, target, what, deadline);
}

}  // namespace tandem::comm
