// comm/group.h: who takes part: a rank among `size` ranks. Geometry and collectives take a Group,
// never a World, so that two-level groups and replicas of shards can come.
#pragma once

namespace tandem::comm {

struct Group {
  int rank = 0;
  int size = 1;
};

}  // namespace tandem::comm
