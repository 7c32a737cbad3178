#include "tests/support/simulated_lanes.h"

#include "comm/device_data_plane.h"
#include "comm/planes.h"
#include "kernels/simulated_device.h"
#include "tests/support/fake_nccl.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace tandem::testing {
namespace {

kernels::QueueDelays delays_of(const WorldOptions& options, int rank) {
  constexpr std::int64_t kPause = 200;
  return {options.queue_delay_seed * 1009U + static_cast<std::uint64_t>(rank),
          options.queue_delay_us > 0 ? options.queue_delay_us : kPause};
}

/// Whose LibTorch "runs on" either of two streams, in turn: what is given to one must wait for what
/// the other did.
class SimulatedTorch final : public zero::TorchDevice {
 public:
  explicit SimulatedTorch(kernels::QueueDelays delays)
      : device_(kernels::make_simulated_device(delays)) {
    for (auto& stream : streams_) stream = device_->make_stream(kernels::Priority::kNormal);
  }
  // What was given last may still use memory of this device.
  ~SimulatedTorch() override { wait_for_all(); }
  SimulatedTorch(const SimulatedTorch&) = delete;
  SimulatedTorch& operator=(const SimulatedTorch&) = delete;
  SimulatedTorch(SimulatedTorch&&) = delete;
  SimulatedTorch& operator=(SimulatedTorch&&) = delete;

  [[nodiscard]] kernels::Device& device() override { return *device_; }
  [[nodiscard]] kernels::Stream& current() override {
    const std::lock_guard lock(mutex_);
    last_ = ++turn_ / 3 % 2;
    return *streams_[last_];
  }
  // LibTorch's CPU works at once.
  void before_torch() override { wait_for_all(); }
  void keep(const at::Tensor& tensor) override {
    const std::lock_guard lock(mutex_);
    kernels::give_simulated_work(*streams_[last_], [tensor] {});
  }
  [[nodiscard]] bool holds(const at::Tensor& tensor) const override {
    return tensor.device().is_cpu();
  }
  [[nodiscard]] at::Tensor tensor_over(std::byte* data,
                                       std::span<const std::int64_t> sizes,
                                       kernels::Dtype dtype,
                                       std::shared_ptr<void> owner) const override {
    return zero::tensor_over(data, sizes, dtype, std::move(owner));
  }

 private:
  void wait_for_all() {
    for (const auto& stream : streams_) {
      static_cast<void>(
          stream->record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(5)));
    }
  }

  const std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> streams_[2];
  std::mutex mutex_;
  std::size_t turn_ = 0;
  std::size_t last_ = 0;
};

// Two devices for LibTorch's CPU: it tells them apart, and works on both alike.
const c10::Device kPlain{c10::kCPU, -1};
const c10::Device kSimulated{c10::kCPU, 0};

class SimulatedLanes final : public engine::Lanes {
 public:
  /// `network`: the ranks' NCCL; null for the staged plane.
  SimulatedLanes(kernels::QueueDelays delays,
                 std::shared_ptr<test_support::FakeNccl> network,
                 int rank,
                 bool mixed)
      : delays_(delays), network_(std::move(network)), rank_(rank), mixed_(mixed) {}

  [[nodiscard]] c10::Device place(const std::string& engine, c10::Device device) const override {
    const int sum = std::accumulate(engine.begin(), engine.end(), 0);
    return mixed_ && sum % 2 == 0 ? kPlain : device.is_cpu() ? kSimulated : device;
  }

  [[nodiscard]] std::string objection(c10::Device device) const override {
    return device.is_cpu() ? "" : "engines train on the CPU and on CUDA devices, here simulated";
  }

  [[nodiscard]] std::unique_ptr<engine::Lane> open(c10::Device device,
                                                   const engine::LaneLinks& links) override {
    auto lane = std::make_unique<engine::Lane>(device);
    if (device == kPlain) {
      lane->torch = zero::make_torch_cpu();
      lane->stream = lane->torch->device().make_stream(kernels::Priority::kHigh);
      lane->plane = comm::make_data_plane(links.rendezvous, links.control);
      return lane;
    }
    lane->torch = std::make_unique<SimulatedTorch>(delays_);
    lane->stream = lane->torch->device().make_stream(kernels::Priority::kHigh);
    const comm::DeviceLinks device_links{links.rendezvous, links.control, lane->torch->device(),
                                         *lane->stream};
    if (network_) {
      lane->plane =
          comm::make_nccl_data_plane(device_links, network_->library(rank_), links.deadline);
    } else {
      lane->host = comm::make_data_plane(links.rendezvous, links.control);
      lane->plane = comm::make_staged_data_plane(device_links, *lane->host);
    }
    return lane;
  }

 private:
  const kernels::QueueDelays delays_;
  const std::shared_ptr<test_support::FakeNccl> network_;
  const int rank_;
  const bool mixed_;
};

}  // namespace

engine::LanesOfRank simulated_lanes(int size, SimulatedPlane plane, const WorldOptions& options) {
  std::shared_ptr<test_support::FakeNccl> network;
  if (plane != SimulatedPlane::kStaged) {
    network = std::make_shared<test_support::FakeNccl>(size);
  }
  const bool mixed = plane == SimulatedPlane::kMixed;
  return [network, options, mixed](int rank) -> std::unique_ptr<engine::Lanes> {
    return std::make_unique<SimulatedLanes>(delays_of(options, rank), network, rank, mixed);
  };
}

}  // namespace tandem::testing
