// tests/support/strict_plane.h: a data plane of a simulated device that holds its callers to what
// they owe a GPU's (comm/data_plane.h), for tests of whole engines.
//
// S1 The memory of every acquire() is still in use: it is filled with NaN of every type some time
//    later, and the mark of that is pending. What is written without waiting for it is lost.
// S2 Whoever posts staging or a gather says which work wrote it.
#pragma once

#include "comm/data_plane.h"
#include "kernels/device.h"

#include <cstdint>
#include <functional>
#include <memory>

namespace tandem::test_support {

/// Called after a call of the engine's was passed on. `stream`: the plane's; with kAcquire that of
/// the memory's former user, before it is given its work (S1).
enum class PlaneCall : std::uint8_t { kAcquire, kPost, kFold };
using OnPlaneCall = std::function<void(PlaneCall call, kernels::Stream& stream)>;

/// Over `plane`, whose work is done on `stream` of `device`.
[[nodiscard]] std::unique_ptr<comm::DataPlane> make_strict_plane(
    std::unique_ptr<comm::DataPlane> plane,
    kernels::Device& device,
    kernels::Stream& stream,
    OnPlaneCall on_call);

}  // namespace tandem::test_support
