// tests/support/simulated_lanes.h: worlds of threads whose engines train on simulated GPUs.
//
// Tensors are the CPU's, so every model trains there; what Tandem itself does with them goes
// through streams that do it some random time later (kernels/simulated_device.h), and through the
// data planes of GPUs: over a fake NCCL, or staged through the host. Memory that is used after it
// was freed fails the test (watched_device.h), and so does what a GPU's plane is not told or not
// waited for (strict_plane.h).
#pragma once

#include "engine/in_process.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/strict_plane.h"
#include "tests/support/watched_device.h"
#include "zero/torch_device.h"
#include <tandem/options.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

namespace tandem::testing {

/// What LibTorch's own work, which the CPU does at once, waits for.
enum class TorchWork : std::uint8_t {
  kInTurn,  // for what its streams were given before, as a GPU's would
  kAtOnce,  // for nothing: the host goes on beside a stream that hangs; values are not to be read
};

/// LibTorch "runs on" either of two streams, in turn: what is given to one must wait for what the
/// other did.
class SimulatedTorch final : public zero::TorchDevice {
 public:
  SimulatedTorch(kernels::QueueDelays delays, TorchWork work);
  ~SimulatedTorch() override;
  SimulatedTorch(const SimulatedTorch&) = delete;
  SimulatedTorch& operator=(const SimulatedTorch&) = delete;
  SimulatedTorch(SimulatedTorch&&) = delete;
  SimulatedTorch& operator=(SimulatedTorch&&) = delete;

  /// From now on LibTorch is on stream 0 or 1, which is returned.
  kernels::Stream& stay_on(std::size_t stream);

  [[nodiscard]] kernels::Device& device() override { return device_; }
  [[nodiscard]] kernels::Stream& current() override;
  void before_torch() override;
  void keep(const at::Tensor& tensor) override;
  [[nodiscard]] bool holds(const at::Tensor& tensor) const override;
  [[nodiscard]] at::Tensor tensor_over(std::byte* data,
                                       std::span<const std::int64_t> sizes,
                                       kernels::Dtype dtype,
                                       std::shared_ptr<void> owner) const override;

 private:
  void wait_for_all();

  test_support::WatchedDevice device_;
  const TorchWork work_;
  std::unique_ptr<kernels::Stream> streams_[2];
  std::mutex mutex_;
  std::optional<std::size_t> fixed_;
  std::size_t turn_ = 0;
  std::size_t last_ = 0;
};

/// The GPUs of one world.
struct SimulatedGpus {
  std::shared_ptr<test_support::FakeNccl> nccl;  // of all ranks; null: staged through the host
  /// Every other engine, by its name, trains on the CPU as it is.
  bool mixed = false;
  TorchWork torch_work = TorchWork::kInTurn;
  /// When a rank's first engine is made, on its thread; the device lives as long as its world.
  std::function<void(int rank, SimulatedTorch& torch)> opened = [](int, SimulatedTorch&) {};
  /// After a rank's call of its plane was passed on, on the caller's thread; see strict_plane.h.
  std::function<void(int rank, test_support::PlaneCall call, kernels::Stream& stream)> called =
      [](int, test_support::PlaneCall, kernels::Stream&) {};
};

/// Lanes for each rank of one world. Pauses as `options` says, 200 us if it says none.
engine::LanesOfRank simulated_lanes(SimulatedGpus gpus, const WorldOptions& options);

}  // namespace tandem::testing
