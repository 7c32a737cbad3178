// tests/support/simulated_lanes.h: worlds of threads whose engines train on simulated GPUs.
//
// Tensors are the CPU's, so every model trains there; what Tandem itself does with them goes
// through streams that do it some random time later (kernels/simulated_device.h), and through the
// data planes of GPUs: over a fake NCCL, or staged through the host.
#pragma once

#include "engine/in_process.h"
#include <tandem/options.h>
#include <tandem/world.h>

#include <memory>
#include <vector>

namespace tandem::testing {

/// kMixed: over NCCL, and every other engine, by its name, on the CPU as it is.
enum class SimulatedPlane { kNccl, kStaged, kMixed };

/// Lanes for each rank of one world of `size` ranks. Pauses as `options` says, 200 us if it says
/// none.
engine::LanesOfRank simulated_lanes(int size, SimulatedPlane plane, const WorldOptions& options);

}  // namespace tandem::testing
