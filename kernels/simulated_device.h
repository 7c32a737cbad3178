// kernels/simulated_device.h: a test instrument: a device on the CPU that behaves like a GPU.
//
// Every stream is a thread that does what it was given some pseudo-random time later. Calls return
// at once, so whoever reads too early, or gives memory back too early, finds old bytes: a wait that
// a GPU would need and that is missing shows as wrong bits here.
//
// S1 All memory is the host's; device memory is not told from it.
// S2 allocate()'s zeros are there when it returns, as on a GPU.
// Called by tests, through engine.
#pragma once

#include "kernels/device.h"
#include "kernels/queue.h"

#include <functional>
#include <memory>

namespace tandem::kernels {

/// `delays`: of every job of every stream.
[[nodiscard]] std::unique_ptr<Device> make_simulated_device(QueueDelays delays);

/// Of a stream of such a device: what runs when its turn has come, for code that stands in for
/// another library's work on the stream (a fake NCCL).
void give_simulated_work(Stream& stream, std::function<void()> work);

}  // namespace tandem::kernels
