// Which staging is reused when, and when device memory goes, by marks that the test completes.
#include "comm/device_memory.h"

#include "comm/device_staging_pool.h"
#include "comm/mark_wait.h"
#include "kernels/cpu_device.h"
#include "tests/comm/device_rig.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <atomic>
#include <thread>

namespace tandem::comm {
namespace {

using kernels::Mark;
using testing::AllOf;
using testing::HasSubstr;

class Switch final : public Mark::State {
 public:
  [[nodiscard]] bool complete() const override {
    if (failed) throw kernels::DeviceError("the device fell off the bus");
    return done;
  }
  [[nodiscard]] double seconds_since(const State& /*earlier*/) const override { return 0.0; }
  std::atomic<bool> done{false};
  std::atomic<bool> failed{false};
};

struct PoolTest : testing::Test {
  const std::unique_ptr<kernels::Device> device = kernels::make_cpu_device();
  RetiredMemory retired;
  DeviceStagingPool pool{{.name = "critic",
                          .parameter_bytes = 0,
                          .largest_staging = 4096,
                          .staging_slots = 6,
                          .posts_in_flight = 6},
                         *device,
                         retired};

  /// A slot that a fold uses until the switch is set.
  std::shared_ptr<Switch> fold(const Staging& staging) {
    auto state = std::make_shared<Switch>();
    pool.posted(staging);
    pool.folded(staging.slot, Mark(state));
    return state;
  }
};

TEST_F(PoolTest, ReusesTheHottestSlotThatNoWorkUses) {
  const Staging one = pool.acquire(100);
  const Staging two = pool.acquire(100);
  const auto first = fold(one);
  const auto second = fold(two);
  first->done = true;
  second->done = true;
  const Staging again = pool.acquire(100);
  EXPECT_EQ(again.slot, two.slot) << "used last";
  EXPECT_TRUE(again.pending.empty());
  EXPECT_EQ(pool.acquire(100).slot, one.slot);
  EXPECT_EQ(pool.bytes(), 200U);
}

TEST_F(PoolTest, TakesMoreMemoryRatherThanWaitForAFoldButNotWithoutEnd) {
  std::vector<Staging> used;
  std::vector<std::shared_ptr<Switch>> folds;
  for (std::size_t i = 0; i < DeviceStagingPool::kInUse; ++i) {
    used.push_back(pool.acquire(100));
    folds.push_back(fold(used.back()));
    EXPECT_EQ(pool.bytes(), 100 * (i + 1));
  }
  const Staging next = pool.acquire(100);
  EXPECT_EQ(next.slot, used.front().slot) << "folded first";
  ASSERT_EQ(next.pending.size(), 1U);
  EXPECT_EQ(next.pending.front().state(), folds.front().get());
  EXPECT_EQ(pool.bytes(), 100 * DeviceStagingPool::kInUse);
}

TEST_F(PoolTest, GrowsASlotWhenAllHaveMemoryAndKeepsTheOldOneWhileItIsUsed) {
  std::vector<Staging> held;
  for (int i = 0; i < 6; ++i) held.push_back(pool.acquire(i == 3 ? 200 : 100));
  std::byte* const old = held[3].data;
  const auto use = fold(held[3]);
  old[0] = std::byte{42};
  const Staging grown = pool.acquire(300);
  EXPECT_NE(grown.data, old);
  EXPECT_TRUE(grown.pending.empty()) << "nobody uses the new memory";
  EXPECT_EQ(pool.bytes(), 800U);
  EXPECT_EQ(old[0], std::byte{42}) << "a sanitizer sees it if it is gone";
  use->done = true;
  retired.sweep();
}

TEST_F(PoolTest, TrimLeavesWhatWorkUses) {
  const auto use = fold(pool.acquire(100));
  pool.trim(0);
  EXPECT_EQ(pool.bytes(), 100U);
  use->done = true;
  pool.trim(0);
  EXPECT_EQ(pool.bytes(), 0U);
}

TEST_F(PoolTest, WhatIsGivenBackKeepsItsMarks) {
  const auto before = fold(pool.acquire(4096));
  std::vector<Staging> others;
  for (int i = 0; i < 5; ++i) others.push_back(pool.acquire(100));
  Staging staging = pool.acquire(4096);
  ASSERT_EQ(staging.pending.size(), 1U);
  auto writer = std::make_shared<Switch>();
  staging.pending = {Mark(writer)};
  pool.give_back(staging);
  EXPECT_EQ(pool.acquire(4096).pending.size(), 2U);
}

TEST_F(PoolTest, RefusesStagingThatWasNotAcquired) {
  const Staging staging = pool.acquire(100);
  fold(staging);
  EXPECT_THROW(pool.posted(staging), InvalidArgument);
  EXPECT_THROW(pool.give_back(staging), InvalidArgument);
}

TEST(RetiredMemory, GoesWhenAllItsUsersAreDoneOrTheDeviceHasFailed) {
  RetiredMemory retired;
  const auto kept = std::make_shared<std::byte>();
  const auto lost = std::make_shared<std::byte>();
  auto one = std::make_shared<Switch>();
  auto two = std::make_shared<Switch>();
  auto failing = std::make_shared<Switch>();
  retired.keep(kept, {Mark(one), Mark(two)});
  retired.keep(lost, {Mark(failing)});
  one->done = true;
  retired.sweep();
  EXPECT_EQ(kept.use_count(), 2);
  EXPECT_EQ(lost.use_count(), 2);
  two->done = true;
  failing->failed = true;
  retired.sweep();
  EXPECT_EQ(kept.use_count(), 1);
  EXPECT_EQ(lost.use_count(), 1);
}

TEST(RetiredMemory, IsWaitedForInTheEnd) {
  const auto memory = std::make_shared<std::byte>();
  auto use = std::make_shared<Switch>();
  std::thread device;
  std::atomic<bool> was_kept{false};
  {
    RetiredMemory retired;
    retired.keep(memory, {Mark(use)});
    device = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      was_kept = memory.use_count() == 2;
      use->done = true;
    });
  }
  device.join();
  EXPECT_TRUE(was_kept);
  EXPECT_EQ(memory.use_count(), 1);
}

TEST(Scratch, KeepsWhatWorkUsesWhenItGrowsAndWhenItGoes) {
  for (const bool grows : {true, false}) {
    WatchedDevice device({1, 5000});  // sees what is written after it was freed
    const auto stream = device.make_stream(kernels::Priority::kNormal);
    RetiredMemory retired;
    Scratch scratch(device, *stream, retired);
    scratch.grow(400, "engine 'critic'");
    for (int i = 0; i < 5; ++i) {
      const Scratch::Lease lease(scratch);
      device.fill(*stream, reinterpret_cast<float*>(lease.data()), 1.0F, 100);
    }
    if (!grows) continue;
    {
      // While a fold gives its work, an engine is made, and what was given before is done.
      const Scratch::Lease lease(scratch);
      scratch.grow(800, "engine 'actor'");
      ASSERT_TRUE(stream->record().wait_until(patient().at));
      device.fill(*stream, reinterpret_cast<float*>(lease.data()), 1.0F, 100);
      EXPECT_NE(Scratch::Lease(scratch).data(), lease.data());
    }
    retired.sweep();
  }
}

struct AwaitTest : testing::Test {
  const std::string where = "engine 'critic'";
  const std::string what = "bucket 3";
  const Awaited awaited{where, what, {1, 4}};
  std::shared_ptr<Switch> state = std::make_shared<Switch>();
};

TEST_F(AwaitTest, ADeadlineNamesWhatIsLate) {
  try {
    await_mark(
        Mark(state), [] {}, awaited, soon());
    ADD_FAILURE() << "never complete";
  } catch (const Timeout& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("'critic'"), HasSubstr("bucket 3"), HasSubstr("rank 1 of 4")));
  }
}

TEST_F(AwaitTest, EndsAtOnceWhenTheCheckThrows) {
  int checks = 0;
  const auto begin = Clock::now();
  EXPECT_THROW(await_mark(
                   Mark(state),
                   [&] {
                     if (++checks == 3) throw WorldBroken("rank 2 failed");
                   },
                   awaited, patient()),
               WorldBroken);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
}

TEST_F(AwaitTest, WhatAnAbortHasEndedIsNotDone) {
  state->done = true;
  EXPECT_THROW(await_mark(
                   Mark(state), [] { throw WorldBroken("aborted"); }, awaited, patient()),
               WorldBroken);
}

TEST_F(AwaitTest, ThrowsWhatHasFailedOnTheDevice) {
  state->failed = true;
  EXPECT_THROW(await_mark(
                   Mark(state), [] {}, awaited, patient()),
               kernels::DeviceError);
}

}  // namespace
}  // namespace tandem::comm
