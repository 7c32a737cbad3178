// comm/device_data_plane.h: the data planes of engines whose tensors lie on a device.
//
// Two ways for ranks to reach each other: NCCL, where every rank has a GPU of its own, and the
// ranks' shared memory (or messages), over copies on the host, where several use one GPU. The sums
// have the same bits either way, and as on the CPU.
// Called by engine (World).
#pragma once

#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/nccl.h"
#include "comm/rendezvous.h"
#include "kernels/device.h"

#include <memory>

namespace tandem::comm {

/// What a device's plane works with; all of it outlives the plane.
struct DeviceLinks {
  Rendezvous& rendezvous;
  ControlPlane& control;
  kernels::Device& device;
  kernels::Stream& stream;  // on which reductions and gathers are done
};

/// Collective. Throws DeviceError, Timeout: the same on all ranks.
std::unique_ptr<DataPlane> make_nccl_data_plane(const DeviceLinks& links,
                                                std::unique_ptr<Nccl> nccl,
                                                Deadline deadline);

/// Over `host`, the plane that the ranks' CPU engines have, which outlives it.
std::unique_ptr<DataPlane> make_staged_data_plane(const DeviceLinks& links, DataPlane& host);

}  // namespace tandem::comm
