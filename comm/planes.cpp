#include "comm/planes.h"

#include "comm/message_control_plane.h"
#include "comm/shared_control_plane.h"
#include "comm/shared_data_plane.h"

namespace tandem::comm {

std::unique_ptr<ControlPlane> make_control_plane(Rendezvous& rendezvous, Deadline deadline) {
  return rendezvous.nodes().count() == 1 ? make_shared_control_plane(rendezvous, deadline)
                                         : make_message_control_plane(rendezvous, deadline);
}

std::unique_ptr<DataPlane> make_data_plane(Rendezvous& rendezvous, ControlPlane& control) {
  return make_shared_data_plane(rendezvous, control);
}

}  // namespace tandem::comm
