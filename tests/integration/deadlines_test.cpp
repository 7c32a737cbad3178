// tests/integration/deadlines_test.cpp: a rank that does not come. The others get a Timeout when
// their deadline has passed, not much later; afterwards the world says that it is broken, and its
// end does not hang.
#include "tests/support/scenarios.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

namespace tandem::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTimeout{400};
// A loaded machine may wake a waiter late; a wait without a deadline would be longer than this.
constexpr std::chrono::seconds kMuchLater{15};

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

/// The last rank does not make `call` until the others are through with it.
void expect_timeout(const std::function<void(World&, ScaleEngine&)>& call) {
  std::atomic<int> through{0};
  const auto start = Clock::now();
  on_threads(3, {.timeout = kTimeout}, [&](World& world) {
    ScaleEngine net(world, std::make_shared<Scale>(1, 0.0), {.name = "net"});
    if (world.rank() + 1 == world.size()) {
      while (through < 2 && Clock::now() - start < kMuchLater) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      EXPECT_THROW(call(world, net), Error);
      return;
    }
    const auto begin = Clock::now();
    bool timed_out = false;
    try {
      call(world, net);
    } catch (const Timeout& timeout) {
      timed_out = true;
      EXPECT_NE(std::string(timeout.what()), "");
    } catch (const WorldBroken&) {
      // The other waiting rank's deadline passed first, and it has said so.
      timed_out = true;
    }
    EXPECT_TRUE(timed_out);
    EXPECT_LT(Clock::now() - begin, kMuchLater);
    EXPECT_THROW(world.step(), WorldBroken);
    ++through;
  });
  EXPECT_LT(Clock::now() - start, kMuchLater) << "the end of the worlds included";
  EXPECT_EQ(through, 2);
}

TEST(Deadlines, OfAStep) {
  expect_timeout([](World& world, ScaleEngine&) { world.step(); });
}

TEST(Deadlines, OfAValue) {
  expect_timeout([](World& world, ScaleEngine&) { static_cast<void>(world.sum(1.0)); });
}

TEST(Deadlines, OfZeroGrad) {
  expect_timeout([](World& world, ScaleEngine&) { world.zero_grad(); });
}

TEST(Deadlines, OfAPass) {
  expect_timeout([](World& world, ScaleEngine& net) {
    net.forward(torch::ones({1})).sum().backward();
    world.step();
  });
}

TEST(Deadlines, OfARegistration) {
  expect_timeout([](World& world, ScaleEngine&) {
    ScaleEngine other(world, std::make_shared<Scale>(1, 0.0), {.name = "other"});
  });
}

TEST(Deadlines, OfTheEnd) {
  const auto start = Clock::now();
  on_threads(2, {.timeout = kTimeout}, [&](World& world) {
    if (world.rank() == 0) {
      EXPECT_THROW(world.close(), Error);
      EXPECT_LT(Clock::now() - start, kMuchLater);
    } else {
      std::this_thread::sleep_for(4 * kTimeout);
    }
  });
  EXPECT_LT(Clock::now() - start, kMuchLater);
}

// A rank whose program dies of an exception leaves its world without a word: the others do not wait
// for ever.
TEST(Deadlines, OfARankThatThrewAway) {
  const auto start = Clock::now();
  EXPECT_THROW(on_threads(2, {.timeout = kTimeout},
                          [&](World& world) {
                            if (world.rank() == 1) {
                              throw std::runtime_error("gone");
                            }
                            EXPECT_THROW(world.step(), Error);
                          }),
               std::runtime_error);
  EXPECT_LT(Clock::now() - start, kMuchLater);
}

}  // namespace
}  // namespace tandem::testing
