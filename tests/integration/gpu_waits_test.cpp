// tests/integration/gpu_waits_test.cpp: waits of whole engines for streams that are far behind. The
// random pauses of simulated GPUs seldom need them; here LibTorch's stream is held up, so that each
// test fails every time where nobody waits.
#include "engine/in_process.h"
#include "tests/support/gate.h"
#include "tests/support/models.h"
#include "tests/support/simulated_lanes.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace tandem::testing {
namespace {

using test_support::FakeNccl;
using test_support::Gate;
using test_support::PlaneCall;

/// Long enough for everything that does not wait.
constexpr std::chrono::milliseconds kHeldUp{300};

/// Holds up a stream for a while.
class HeldUp {
 public:
  void begin(kernels::Stream& stream) {
    gate_.emplace(stream);
    opener_ = std::thread([this] {
      std::this_thread::sleep_for(kHeldUp);
      over_ = true;
      gate_->open();
    });
  }
  HeldUp() = default;
  ~HeldUp() {
    if (opener_.joinable()) opener_.join();
  }
  HeldUp(const HeldUp&) = delete;
  HeldUp& operator=(const HeldUp&) = delete;
  HeldUp(HeldUp&&) = delete;
  HeldUp& operator=(HeldUp&&) = delete;

  [[nodiscard]] bool over() const { return over_; }

 private:
  std::optional<Gate> gate_;
  std::atomic<bool> over_{false};
  std::thread opener_;
};

/// Runs `body` on each rank; `opened` as SimulatedGpus says.
void on_gpus(int size,
             const std::function<void(int rank, SimulatedTorch& torch)>& opened,
             const Body& body) {
  SimulatedGpus gpus{.nccl = std::make_shared<FakeNccl>(size), .opened = opened};
  on_threads(engine::make_in_process(size, patient(), simulated_lanes(std::move(gpus), patient())),
             body);
}

// LibTorch copies the parameters to their place on its stream.
TEST(GpuWaits, ParametersAreBroadcastOnceTheyAreInTheirPlace) {
  std::vector<HeldUp> held(2);
  on_gpus(
      2,
      [&](int rank, SimulatedTorch& torch) {
        held.at(static_cast<std::size_t>(rank)).begin(torch.stay_on(0));
      },
      [&](World& world) {
        const Engine net(world, std::make_shared<Scale>(8, 1.0), {.name = "net"});
        EXPECT_TRUE(held.at(static_cast<std::size_t>(world.rank())).over());
      });
}

// Adagrad's sums are filled on the stream of the registration, and the step is on another.
TEST(GpuWaits, AStepOnAnotherStreamFindsTheOptimizersFirstState) {
  HeldUp held;
  SimulatedTorch* gpu = nullptr;
  on_gpus(
      1,
      [&](int, SimulatedTorch& torch) {
        gpu = &torch;
        held.begin(torch.stay_on(0));
      },
      [&](World& world) {
        Engine net(
            world, std::make_shared<Scale>(8, 1.0),
            {.name = "net", .optimizer = Adagrad{.lr = 0.5, .initial_accumulator_value = 3}});
        gpu->stay_on(1);
        net.forward(torch::ones({8})).sum().backward();
        EXPECT_TRUE(world.step().applied);
        // 1 - 0.5 * 1 / sqrt(3 + 1)
        EXPECT_TRUE(torch::equal(net->w.detach(), torch::full({8}, 0.75F)));
      });
}

/// A parameter and a buffer.
class Counted : public Scale {
 public:
  Counted() : Scale(8, 1.0) { mean = register_buffer("mean", torch::zeros({4})); }

  at::Tensor mean;
};

// LibTorch copies buffers into staging whose last reduction may still be read.
TEST(GpuWaits, BuffersAreCopiedOnceTheirStagingIsFree) {
  struct Rank {
    std::atomic<int> staged{0};
    std::atomic<int> posts{0};
    HeldUp former;
    bool waited = false;
  };
  std::vector<Rank> ranks(2);
  SimulatedGpus gpus{.nccl = std::make_shared<FakeNccl>(2)};
  gpus.called = [&](int rank, PlaneCall call, kernels::Stream& stream) {
    Rank& mine = ranks.at(static_cast<std::size_t>(rank));
    // The first staging is the gradients', the second the buffers'.
    if (call == PlaneCall::kAcquire && ++mine.staged == 2) mine.former.begin(stream);
    if (call == PlaneCall::kPost && ++mine.posts == 2) mine.waited = mine.former.over();
  };
  on_threads(engine::make_in_process(2, patient(), simulated_lanes(gpus, patient())),
             [&](World& world) {
               Engine net(world, std::make_shared<Counted>(),
                          {.name = "net", .buffers = BufferPolicy::kAverage});
               net->mean.fill_(static_cast<float>(world.rank()));
               net.forward(torch::ones({8})).sum().backward();
               EXPECT_TRUE(world.step().applied);
               EXPECT_TRUE(ranks.at(static_cast<std::size_t>(world.rank())).waited);
               EXPECT_TRUE(torch::equal(net->mean, torch::full({4}, 0.5F)));
             });
}

// LibTorch gives the sum memory that work on its stream may still use.
TEST(GpuWaits, BuffersAreSummedOnceTheSumsMemoryIsFree) {
  struct Rank {
    SimulatedTorch* gpu = nullptr;
    std::atomic<int> posts{0};
    std::atomic<int> folds{0};
    std::optional<Gate> gate;
    bool waited = false;
  };
  std::vector<Rank> ranks(2);
  SimulatedGpus gpus{.nccl = std::make_shared<FakeNccl>(2)};
  gpus.opened = [&](int rank, SimulatedTorch& torch) {
    torch.stay_on(0);
    ranks.at(static_cast<std::size_t>(rank)).gpu = &torch;
  };
  gpus.called = [&](int rank, PlaneCall call, kernels::Stream& stream) {
    Rank& mine = ranks.at(static_cast<std::size_t>(rank));
    // The first post is the gradients', the second the buffers'.
    if (call == PlaneCall::kPost && ++mine.posts == 2) mine.gate.emplace(mine.gpu->stay_on(0));
    if (call == PlaneCall::kFold && ++mine.folds == 2) {
      mine.waited = test_support::is_held_up(stream.record());
      mine.gate->open();
    }
  };
  on_threads(engine::make_in_process(2, patient(), simulated_lanes(gpus, patient())),
             [&](World& world) {
               Engine net(world, std::make_shared<Counted>(),
                          {.name = "net", .buffers = BufferPolicy::kAverage});
               net->mean.fill_(static_cast<float>(world.rank()));
               net.forward(torch::ones({8})).sum().backward();
               EXPECT_TRUE(world.step().applied);
               EXPECT_TRUE(ranks.at(static_cast<std::size_t>(world.rank())).waited);
               EXPECT_TRUE(torch::equal(net->mean, torch::full({4}, 0.5F)));
             });
}

// The reduction writes into the engine's sums after the engine has gone; watched_device.h sees
// whether its memory went first.
TEST(GpuWaits, MemoryOfAnEngineStaysUntilItsReductionsAreDone) {
  SimulatedTorch* gpu = nullptr;
  on_gpus(
      1, [&](int, SimulatedTorch& torch) { gpu = &torch; },
      [&](World& world) {
        auto net = std::make_unique<Engine<std::shared_ptr<Scale>>>(
            world, std::make_shared<Scale>(8, 1.0), EngineOptions{.name = "net"});
        Gate gate(gpu->stay_on(0));
        net->forward(torch::ones({8})).sum().backward();
        net.reset();
        std::this_thread::sleep_for(kHeldUp);  // whoever frees it has done so
        gate.open();
      });
}

}  // namespace
}  // namespace tandem::testing
