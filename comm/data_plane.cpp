#include "comm/data_plane.h"

namespace tandem::comm {

std::string describe(const ChannelSpec& spec) {
  return "engine '" + spec.name + "' with " + std::to_string(spec.parameter_bytes) +
         " bytes of parameters, " + std::to_string(spec.staging_slots) + " staging slots of " +
         std::to_string(spec.largest_staging) + " bytes, " + std::to_string(spec.posts_in_flight) +
         " posts in flight" + (spec.share_parameters ? ", parameters shared on a node" : "");
}

}  // namespace tandem::comm
