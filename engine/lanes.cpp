// engine/lanes.cpp: the lanes that a build has: the CPU's, and a GPU's.
#include "comm/collective_try.h"
#include "comm/device_data_plane.h"
#include "comm/mark_wait.h"
#include "comm/nccl_library.h"
#include "comm/planes.h"
#include "engine/gpu.h"
#include "engine/lane.h"
#include "zero/torch_cuda.h"
#include <tandem/error.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <vector>

namespace tandem::engine {

namespace {

void parallel(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  at::parallel_for(0, count, 1, body);
}

std::unique_ptr<Lane> open_cpu(const LaneLinks& links) {
  auto lane = std::make_unique<Lane>(c10::kCPU);
  lane->torch = zero::make_torch_cpu(parallel);
  lane->stream = lane->torch->device().make_stream(kernels::Priority::kHigh);
  lane->plane = comm::make_data_plane(links.rendezvous, links.control);
  return lane;
}

/// The first two ranks that use one GPU, or nothing.
std::optional<std::pair<std::size_t, std::size_t>> sharing(const std::vector<std::string>& gpus) {
  std::map<std::string, std::size_t> first;
  for (std::size_t rank = 0; rank < gpus.size(); ++rank) {
    const auto [other, fresh] = first.emplace(gpus[rank], rank);
    if (!fresh) {
      return std::pair{other->second, rank};
    }
  }
  return std::nullopt;
}

std::unique_ptr<Lane> open_cuda(c10::Device device, const LaneLinks& links) {
  auto lane = std::make_unique<Lane>(device);
  std::string gpu;
  comm::try_on_all_ranks(links.rendezvous, "opening each rank's GPU", "", links.deadline, [&] {
    lane->torch = zero::make_torch_cuda(device.index());
    // Ahead of the user's kernels: reductions are short, and somebody waits for them.
    lane->stream = lane->torch->device().make_stream(kernels::Priority::kHigh);
    gpu = gpu_identity(device.index());
  });
  const comm::DeviceLinks device_links{links.rendezvous, links.control, lane->torch->device(),
                                       *lane->stream};
  const std::vector<std::string> gpus =
      links.rendezvous.all_gather("which GPU each rank uses", gpu, links.deadline);
  const auto shared = sharing(gpus);
  if (!shared) {
    std::unique_ptr<comm::Nccl> nccl;  // one rank needs none
    if (gpus.size() > 1) {
      nccl = comm::make_nccl_library(device.index());
    }
    lane->plane = comm::make_nccl_data_plane(device_links, std::move(nccl), links.deadline);
    return lane;
  }
  if (links.rendezvous.group().rank == 0) {
    std::fprintf(stderr,
                 "tandem: ranks %zu and %zu use one GPU (%s), which NCCL does not serve: gradients "
                 "and parameters travel through the host's memory\n",
                 shared->first, shared->second, gpus[shared->first].c_str());
  }
  lane->host = comm::make_data_plane(links.rendezvous, links.control);
  lane->plane = comm::make_staged_data_plane(device_links, *lane->host);
  return lane;
}

class BuiltLanes final : public Lanes {
 public:
  explicit BuiltLanes(Ranks ranks) : ranks_(ranks) {}

  [[nodiscard]] std::string objection(c10::Device device) const override {
    if (device.is_cuda() && ranks_ == Ranks::kThreads) {
      return "ranks that are threads of one process train on the CPU, since LibTorch gives a "
             "process one thread for the backward passes of a GPU; start processes (mpirun)";
    }
    if (device.is_cpu() || (device.is_cuda() && cuda_is_built())) {
      return "";
    }
    return device.is_cuda() ? "this Tandem was built without CUDA; configure it with "
                              "TANDEM_CUDA=ON"
                            : "engines train on the CPU and on CUDA devices";
  }

  [[nodiscard]] std::unique_ptr<Lane> open(c10::Device device, const LaneLinks& links) override {
    return device.is_cpu() ? open_cpu(links) : open_cuda(device, links);
  }

 private:
  const Ranks ranks_;
};

}  // namespace

void Lane::reduced(kernels::Mark begin, const Trace::About& about, comm::Deadline deadline) {
  if (begin.state() == nullptr) {
    return;
  }
  kernels::Mark end = stream->record();
  watch(end, deadline, "the reduction of bucket " + std::to_string(about.bucket));
  const std::lock_guard lock(mutex_);
  reductions_.push_back({std::move(begin), std::move(end), about});
}

bool Lane::finish(const kernels::Mark& mark, comm::Deadline deadline) noexcept {
  constexpr std::chrono::seconds kForTheEnd{10};  // what was aborted ends at once, or never
  try {
    comm::await_mark(
        mark, [this] { plane->check(); }, {}, deadline);
    return true;
  } catch (...) {
    plane->abort();
  }
  try {
    static_cast<void>(mark.wait_until(comm::Clock::now() + kForTheEnd));
  } catch (...) {  // NOLINT(bugprone-empty-catch): a device that failed does no more work
  }
  return false;
}

void Lane::watch(kernels::Mark mark, comm::Deadline deadline, std::string what) {
  if (mark.state() == nullptr) {
    return;
  }
  const std::lock_guard lock(mutex_);
  watched_.push_back({std::move(mark), deadline, std::move(what)});
}

std::optional<std::string> Lane::first_late() {
  const std::lock_guard lock(mutex_);
  while (!watched_.empty() && watched_.front().mark.complete()) {
    watched_.pop_front();
  }
  if (!watched_.empty() && watched_.front().deadline.passed()) {
    return watched_.front().what;
  }
  return std::nullopt;
}

double Lane::take_reductions(const kernels::Mark& done, Trace& trace) {
  std::vector<Reduction> reductions;
  {
    const std::lock_guard lock(mutex_);
    reductions.swap(reductions_);
  }
  const std::int64_t now = trace.on() ? Trace::now() : -1;
  double seconds = 0.0;
  for (const Reduction& one : reductions) {
    seconds += one.end.seconds_since(one.begin);
    if (now >= 0) {  // the device's clock is another one: counted back from `done`
      const auto before = [&](const kernels::Mark& mark) {
        return now - static_cast<std::int64_t>(done.seconds_since(mark) * 1e9);
      };
      trace.span("fold", Trace::Row::kDevice, before(one.begin), before(one.end), one.about);
    }
  }
  return seconds;
}

std::unique_ptr<Lanes> make_lanes(Ranks ranks) { return std::make_unique<BuiltLanes>(ranks); }

}  // namespace tandem::engine
