// tests/integration/overlap_test.cpp: buckets are reduced while backward still runs. A node between
// two layers holds the backward up until the buckets behind it have been launched and, with peers,
// read from them: if the reductions only came after the backward, the node would wait for its whole
// deadline.
#include "tests/support/nodes.h"
#include "tests/support/scenarios.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <thread>

namespace tandem::testing {
namespace {

constexpr std::chrono::seconds kDeadline{15};

/// Waits until `buckets` more reductions were launched than at its making, and something more was
/// folded.
class LaunchWait {
 public:
  LaunchWait(const World& world, std::int64_t buckets)
      : world_(world), buckets_(buckets), before_(world.wire_report()) {}

  void operator()() {
    const auto end = std::chrono::steady_clock::now() + kDeadline;
    while (!reached_ && std::chrono::steady_clock::now() < end) {
      const WireReport now = world_.wire_report();
      // Rank 0 owns a slice of every bucket; others may own none of a small one, and read nothing.
      const bool reads = world_.size() > 1 && world_.rank() == 0;
      const bool folded = !reads || now.reduce_bytes > before_.reduce_bytes;
      reached_ = now.launches >= before_.launches + buckets_ && folded;
      if (!reached_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  [[nodiscard]] bool reached() const { return reached_; }

 private:
  const World& world_;
  std::int64_t buckets_;
  WireReport before_;
  bool reached_ = false;
};

/// Large enough that each weight fills blocks of its own.
std::shared_ptr<Mlp> wide(std::uint64_t key) { return std::make_shared<Mlp>(8, 256, 8, key); }

at::Tensor input_of(World& world, int step) { return batch({step, 0, world.rank(), world.size()}); }

// The first pass settles the order, so the second is the first in which everything overlaps.
void warm_up(World& world, const std::function<at::Tensor()>& loss) {
  loss().backward();
  world.step();
}

TEST(Overlap, InsideOneEngine) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, wide(1), {.name = "net", .bucket_bytes = 1});
    ASSERT_GE(net.buckets(), 2);
    std::function<void()> action = [] {};
    const auto loss = [&] {
      const at::Tensor hidden = torch::tanh(net->first(input_of(world, 0)));
      const at::Tensor output = net->second(intercepted(hidden, action));
      net.track(output);
      return output.square().mean();
    };
    warm_up(world, loss);
    LaunchWait wait(world, 1);
    action = [&] { wait(); };
    loss().backward();
    EXPECT_TRUE(wait.reached());
    EXPECT_TRUE(world.step().applied);
  });
}

TEST(Overlap, BetweenTwoEngines) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, wide(1), {.name = "a"});
    Engine b(world, wide(2), {.name = "b"});
    std::function<void()> action = [] {};
    const auto loss = [&] {
      const at::Tensor hidden = intercepted(a.forward(input_of(world, 0)), action);
      return b.forward(hidden).square().mean();
    };
    warm_up(world, loss);
    LaunchWait wait(world, b.buckets());
    action = [&] { wait(); };
    loss().backward();
    EXPECT_TRUE(wait.reached());
    EXPECT_TRUE(world.step().applied);
  });
}

TEST(Overlap, AcrossAFrozenEngine) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, wide(1), {.name = "a"});
    Engine frozen(world, wide(2), {.name = "frozen"});
    Engine c(world, wide(3), {.name = "c"});
    for (const at::Tensor& parameter : frozen->parameters()) {
      parameter.set_requires_grad(false);
    }
    std::function<void()> action = [] {};
    const auto loss = [&] {
      const at::Tensor hidden = intercepted(a.forward(input_of(world, 0)), action);
      return c.forward(frozen.forward(hidden)).square().mean();
    };
    warm_up(world, loss);
    LaunchWait wait(world, c.buckets());
    action = [&] { wait(); };
    loss().backward();
    EXPECT_TRUE(wait.reached());
    EXPECT_TRUE(world.step().applied);
  });
}

// An engine that was trained before but is not in this loss does not stand in the way of the
// others.
TEST(Overlap, PastAnEngineThatThisPassDoesNotUse) {
  on_ranks(patient(), [](World& world) {
    Engine a(world, wide(1), {.name = "a"});
    Engine b(world, wide(2), {.name = "b"});
    Engine absent(world, wide(3), {.name = "absent"});
    std::function<void()> action = [] {};
    const auto loss = [&] {
      const at::Tensor hidden = intercepted(a.forward(input_of(world, 0)), action);
      return b.forward(hidden).square().mean();
    };
    warm_up(world, [&] { return loss() + absent.forward(input_of(world, 1)).square().mean(); });
    LaunchWait wait(world, b.buckets());
    action = [&] { wait(); };
    loss().backward();
    EXPECT_TRUE(wait.reached());
    EXPECT_TRUE(world.step().applied);
  });
}

}  // namespace
}  // namespace tandem::testing
