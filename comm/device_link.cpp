#include "comm/device_link.h"

#include <tandem/error.h>

namespace tandem::comm {

DeviceLink::DeviceLink(const DeviceLinks& links)
    : links_(links),
      group_(links.rendezvous.group()),
      received_(links.device, links.stream, retired_),
      zeros_(links.device, links.stream, retired_) {}

void DeviceLink::check() {
  if (const auto text = links_.control.aborted()) throw WorldBroken(*text);
  if (aborted_) {
    throw WorldBroken("the communication of " + links_.device.name() + " on rank " +
                      std::to_string(group_.rank) + " was aborted; restart from the last " +
                      "checkpoint");
  }
}

std::size_t piece_bytes(const ChannelSpec& spec, int ranks) {
  // Slices begin at multiples of 1,024 elements, so the largest is up to one such block above the
  // mean.
  constexpr std::size_t kBlock = 1024 * sizeof(float);
  const std::size_t mean = spec.largest_staging / static_cast<std::size_t>(ranks);
  return (mean / kBlock + 2) * kBlock;
}

void check_device_spec(const ChannelSpec& spec) {
  if (spec.share_parameters) {
    throw InvalidArgument("engine '" + spec.name +
                          "': share_parameters_on_node is for engines on the CPU: the ranks of a "
                          "node cannot have one parameter memory on their devices; leave it off");
  }
}

}  // namespace tandem::comm
