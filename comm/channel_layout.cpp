#include "comm/channel_layout.h"

#include "comm/segment.h"
#include <tandem/error.h>

#include <algorithm>
#include <bit>
#include <limits>

namespace tandem::comm {

namespace {

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

}  // namespace tandem::comm
