// comm/shared_data_plane.h: the data plane: buckets lie in memory that the ranks of a node share,
// and peers there read their slices in place; ranks of other nodes are sent theirs.
#pragma once

#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/rendezvous.h"

#include <memory>

namespace tandem::comm {

/// `control` is asked for aborts while waiting. Both references outlive the plane.
std::unique_ptr<DataPlane> make_shared_data_plane(Rendezvous& rendezvous, ControlPlane& control);

}  // namespace tandem::comm
