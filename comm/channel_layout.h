// comm/channel_layout.h: where everything lies in one rank's segment of a channel: its head, a ring
// of post records, its parameter memory, its staging slots. A pure function of the spec, so the
// same on all ranks. Called by comm/shared_channel.
#pragma once

#include "comm/data_plane.h"

#include <cstddef>

namespace tandem::comm {

struct ChannelLayout {
  static constexpr std::size_t kHeadBytes = 256;
  static constexpr std::size_t kRecordBytes = 24;

  /// Throws InvalidArgument if the sizes are beyond address space.
  explicit ChannelLayout(const ChannelSpec& spec);

  std::size_t ring = 0;  // records, a power of two
  std::size_t parameters_at = 0;
  std::size_t staging_at = 0;  // what lies before is committed when the channel is opened
  std::size_t slot_bytes = 0;
  std::size_t segment_bytes = 0;
};

}  // namespace tandem::comm
