#include "tests/support/simulated_lanes.h"

#include "comm/device_data_plane.h"
#include "comm/planes.h"
#include "kernels/simulated_device.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <numeric>
#include <string>
#include <utility>

namespace tandem::testing {

SimulatedTorch::SimulatedTorch(kernels::QueueDelays delays, TorchWork work)
    : device_(delays), work_(work) {
  for (auto& stream : streams_) stream = device_.make_stream(kernels::Priority::kNormal);
}

// What was given last may still use memory of this device.
SimulatedTorch::~SimulatedTorch() { wait_for_all(); }

kernels::Stream& SimulatedTorch::stay_on(std::size_t stream) {
  const std::lock_guard lock(mutex_);
  fixed_ = stream;
  return *streams_[stream];
}

kernels::Stream& SimulatedTorch::current() {
  const std::lock_guard lock(mutex_);
  last_ = fixed_.value_or(++turn_ / 3 % 2);
  return *streams_[last_];
}

void SimulatedTorch::before_torch() {
  if (work_ == TorchWork::kInTurn) wait_for_all();
}

void SimulatedTorch::keep(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  kernels::give_simulated_work(*streams_[last_], [tensor] {});
}

bool SimulatedTorch::holds(const at::Tensor& tensor) const { return tensor.device().is_cpu(); }

at::Tensor SimulatedTorch::tensor_over(std::byte* data,
                                       std::span<const std::int64_t> sizes,
                                       kernels::Dtype dtype,
                                       std::shared_ptr<void> owner) const {
  return zero::tensor_over(data, sizes, dtype, std::move(owner));
}

void SimulatedTorch::wait_for_all() {
  for (const auto& stream : streams_) {
    static_cast<void>(
        stream->record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(5)));
  }
}

namespace {

kernels::QueueDelays delays_of(const WorldOptions& options, int rank) {
  constexpr std::int64_t kPause = 200;
  return {options.queue_delay_seed * 1009U + static_cast<std::uint64_t>(rank),
          options.queue_delay_us > 0 ? options.queue_delay_us : kPause};
}

// Two devices for LibTorch's CPU: it tells them apart, and works on both alike.
const c10::Device kPlain{c10::kCPU, -1};
const c10::Device kSimulated{c10::kCPU, 0};

class SimulatedLanes final : public engine::Lanes {
 public:
  SimulatedLanes(SimulatedGpus gpus, kernels::QueueDelays delays, int rank)
      : gpus_(std::move(gpus)), delays_(delays), rank_(rank) {}

  [[nodiscard]] c10::Device place(const std::string& engine, c10::Device device) const override {
    const int sum = std::accumulate(engine.begin(), engine.end(), 0);
    return gpus_.mixed && sum % 2 == 0 ? kPlain : device.is_cpu() ? kSimulated : device;
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
    auto torch = std::make_unique<SimulatedTorch>(delays_, gpus_.torch_work);
    gpus_.opened(rank_, *torch);
    lane->torch = std::move(torch);
    lane->stream = lane->torch->device().make_stream(kernels::Priority::kHigh);
    const comm::DeviceLinks device_links{links.rendezvous, links.control, lane->torch->device(),
                                         *lane->stream};
    if (gpus_.nccl) {
      lane->plane =
          comm::make_nccl_data_plane(device_links, gpus_.nccl->library(rank_), links.deadline);
    } else {
      lane->host = comm::make_data_plane(links.rendezvous, links.control);
      lane->plane = comm::make_staged_data_plane(device_links, *lane->host);
    }
    lane->plane = test_support::make_strict_plane(
        std::move(lane->plane), lane->torch->device(), *lane->stream,
        [called = gpus_.called, rank = rank_](
            test_support::PlaneCall call, kernels::Stream& stream) { called(rank, call, stream); });
    return lane;
  }

 private:
  const SimulatedGpus gpus_;
  const kernels::QueueDelays delays_;
  const int rank_;
};

}  // namespace

engine::LanesOfRank simulated_lanes(SimulatedGpus gpus, const WorldOptions& options) {
  return [gpus = std::move(gpus), options](int rank) -> std::unique_ptr<engine::Lanes> {
    return std::make_unique<SimulatedLanes>(gpus, delays_of(options, rank), rank);
  };
}

}  // namespace tandem::testing
