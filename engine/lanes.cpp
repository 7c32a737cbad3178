// engine/lanes.cpp: the lanes that a build has.
#include "comm/planes.h"
#include "engine/lane.h"

#include <ATen/Parallel.h>

#include <functional>

namespace tandem::engine {

namespace {

void parallel(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

class BuiltLanes final : public Lanes {
 public:
  [[nodiscard]] std::string objection(c10::Device device) const override {
    return device.is_cpu() ? "" : "this version trains on the CPU";
  }

  [[nodiscard]] std::unique_ptr<Lane> open(c10::Device device, const LaneLinks& links) override {
    auto lane = std::make_unique<Lane>(device);
    lane->torch = zero::make_torch_cpu(parallel);
    lane->stream = lane->torch->device().make_stream(kernels::Priority::kHigh);
    lane->plane = comm::make_data_plane(links.rendezvous, links.control);
    return lane;
  }
};

}  // namespace

std::unique_ptr<Lanes> make_lanes() { return std::make_unique<BuiltLanes>(); }

}  // namespace tandem::engine
