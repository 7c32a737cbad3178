// comm/planes.h: the planes that fit a world: shared memory alone on one node, messages between
// several.
// Called by engine (World).
#pragma once

#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/rendezvous.h"

#include <memory>

namespace tandem::comm {

/// Collective. `rendezvous` outlives the planes. Throws Timeout, OutOfMemory, SystemError.
std::unique_ptr<ControlPlane> make_control_plane(Rendezvous& rendezvous, Deadline deadline);
/// `control` is asked for aborts while waiting, and outlives the plane.
std::unique_ptr<DataPlane> make_data_plane(Rendezvous& rendezvous, ControlPlane& control);

}  // namespace tandem::comm
