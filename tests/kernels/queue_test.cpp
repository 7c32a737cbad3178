// Q1 to Q4 of kernels/queue.h, with and without delays. Run under ThreadSanitizer too: the tests
// use plain memory where a queue or an event must order it.
#include "kernels/queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tandem::kernels {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// Far enough that only a hang reaches it.
Clock::time_point deadline() { return Clock::now() + std::chrono::seconds(60); }

bool finish(const Event& event) { return event.wait_until(deadline()); }

/// The message that waiting for `event` throws, or "".
std::string error_of(const Event& event) {
  try {
    EXPECT_TRUE(finish(event));
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

/// Closed until opened; a job that waits at it is certainly running or blocked there.
class Gate {
 public:
  void open() {
    open_.store(true);
    open_.notify_all();
  }
  void wait() { open_.wait(false); }

 private:
  std::atomic<bool> open_{false};
};

class QueueWithDelays : public testing::TestWithParam<std::int64_t> {
 protected:
  [[nodiscard]] QueueDelays delays(std::uint64_t seed) const { return {seed, GetParam()}; }
};
INSTANTIATE_TEST_SUITE_P(Delays, QueueWithDelays, testing::Values(0, 300));

TEST(Event, AnEmptyOneIsComplete) {
  const Event event;
  EXPECT_TRUE(event.complete());
  EXPECT_TRUE(event.wait_until(Clock::now()));
}

TEST(Event, OfAnIdleQueueIsComplete) {
  Queue queue("idle");
  EXPECT_TRUE(queue.record().complete());
}

// Q1
TEST_P(QueueWithDelays, JobsRunInTheirOrder) {
  Queue queue("order", delays(1));
  std::vector<int> seen;
  for (int job = 0; job < 200; ++job) {
    queue.enqueue([&seen, job] { seen.push_back(job); });
  }
  ASSERT_TRUE(finish(queue.record()));
  std::vector<int> expected(200);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(seen, expected);
}

// Q2
TEST(Queue, AnEventIsCompleteOnlyAfterItsJobs) {
  Queue queue("events");
  Gate gate;
  bool ran = false;
  const Event before = queue.record();
  queue.enqueue([&] {
    gate.wait();
    ran = true;
  });
  const Event after = queue.record();
  const Event copy = after;
  EXPECT_TRUE(before.complete());
  EXPECT_FALSE(after.complete());
  const auto start = Clock::now();
  EXPECT_FALSE(copy.wait_until(start + milliseconds(20)));
  EXPECT_GE(Clock::now() - start, milliseconds(20));
  gate.open();
  EXPECT_TRUE(copy.wait_until(Clock::time_point::max()));
  EXPECT_TRUE(after.complete());
  EXPECT_TRUE(ran);
}

TEST(Queue, WhatAJobHoldsIsReleasedBeforeTheEvent) {
  Queue queue("release");
  for (int trial = 0; trial < 100; ++trial) {
    auto held = std::make_shared<int>(trial);
    const std::weak_ptr<int> observer = held;
    queue.enqueue([held = std::move(held)] { static_cast<void>(*held); });
    ASSERT_TRUE(finish(queue.record()));
    ASSERT_TRUE(observer.expired());
  }
}

// No lock is held then either: this would deadlock.
TEST(Queue, WhatAJobHoldsMayEnqueueWhenItIsReleased) {
  Queue queue("release");
  Gate gate;
  const auto enqueues = [&](const int* number) {
    delete number;
    queue.enqueue([&] { gate.open(); });
  };
  queue.enqueue([held = std::shared_ptr<int>(new int(1), enqueues)] { static_cast<void>(held); });
  gate.wait();
  EXPECT_TRUE(finish(queue.record()));
}

/// Three queues pass one plain number round: each adds its part after the previous one's event.
TEST_P(QueueWithDelays, WaitsJoinQueues) {
  Queue first("first", delays(1)), second("second", delays(2)), third("third", delays(3));
  std::int64_t number = 1, expected = 1;
  Event last;
  for (int round = 0; round < 50; ++round) {
    first.wait(last);
    first.enqueue([&number] { number = number * 3 % 1'000'003; });
    second.wait(first.record());
    second.enqueue([&number, round] { number += round; });
    third.wait(second.record());
    third.enqueue([&number] { number = number * 7 % 1'000'003; });
    last = third.record();
    expected = (expected * 3 % 1'000'003 + round) * 7 % 1'000'003;
  }
  ASSERT_TRUE(finish(last));
  EXPECT_EQ(number, expected);
}

// Without the wait the delays show it: the second queue does not stop for the first.
TEST(Queue, QueuesRunSideBySideUnlessTheyWait) {
  Queue slow("slow"), fast("fast");
  Gate gate;
  slow.enqueue([&] { gate.wait(); });
  bool ran = false;
  fast.enqueue([&] { ran = true; });
  EXPECT_TRUE(finish(fast.record()));
  EXPECT_TRUE(ran);
  fast.wait(slow.record());
  fast.enqueue([] {});
  EXPECT_FALSE(fast.record().wait_until(Clock::now() + milliseconds(20)));
  gate.open();
  EXPECT_TRUE(finish(fast.record()));
}

TEST(Queue, WaitingForAnOwnEventDoesNotBlock) {
  Queue queue("own");
  int value = 0;
  queue.enqueue([&] { value = 1; });
  queue.wait(queue.record());
  queue.enqueue([&] { value += 1; });
  ASSERT_TRUE(finish(queue.record()));
  EXPECT_EQ(value, 2);
}

// No lock is held while a job runs or a queue waits.
TEST_P(QueueWithDelays, JobsMayEnqueueAnywhere) {
  Queue first("first", delays(5)), second("second", delays(6));
  std::atomic<int> jobs{0};
  Gate gate;
  const auto count = [&] {
    if (++jobs == 30 * 4) gate.open();
  };
  for (int round = 0; round < 30; ++round) {
    first.enqueue([&] {
      count();
      first.enqueue(count);
      second.wait(first.record());
      second.enqueue([&] {
        count();
        first.wait(second.record());
        first.enqueue(count);
      });
    });
  }
  gate.wait();
  EXPECT_TRUE(finish(first.record()));
  EXPECT_TRUE(finish(second.record()));
  EXPECT_EQ(jobs.load(), 120);
}

TEST(Queue, JobsEnqueuedWhileTheQueueWaitsForAnotherRunAfterwards) {
  Queue first("first"), second("second");
  Gate gate;
  int value = 0;
  first.enqueue([&] {
    gate.wait();
    value = 1;
  });
  second.wait(first.record());  // second's worker now waits, and still takes jobs
  std::this_thread::sleep_for(milliseconds(10));
  second.enqueue([&] { value += 1; });
  const Event end = second.record();
  gate.open();
  ASSERT_TRUE(finish(end));
  EXPECT_EQ(value, 2);
}

// Q3
TEST_P(QueueWithDelays, AFailedJobFailsItsQueue) {
  Queue queue("failing", delays(7));
  Gate gate;
  int ran = 0;
  queue.enqueue([&] {
    gate.wait();
    ++ran;
  });
  const Event before = queue.record();
  queue.enqueue([] { throw std::runtime_error("first"); });
  const Event at = queue.record();
  queue.enqueue([&] { ++ran; });
  queue.enqueue([] { throw std::runtime_error("second"); });
  const Event later = queue.record();
  gate.open();
  EXPECT_EQ(error_of(later), "first");
  EXPECT_EQ(error_of(at), "first");
  EXPECT_EQ(error_of(at), "first");  // every time
  EXPECT_EQ(error_of(before), "");
  EXPECT_EQ(error_of(queue.record()), "first");
  EXPECT_EQ(ran, 1);
  ASSERT_TRUE(queue.error() != nullptr);
  EXPECT_THROW(std::rethrow_exception(queue.error()), std::runtime_error);
}

TEST_P(QueueWithDelays, AFailureReachesTheQueuesThatWaitForIt) {
  Queue first("first", delays(8)), second("second", delays(9)), bystander("bystander");
  bool before = false, after = false;
  first.enqueue([] { throw std::runtime_error("broken"); });
  second.enqueue([&] { before = true; });
  second.wait(first.record());
  second.enqueue([&] { after = true; });
  EXPECT_EQ(error_of(second.record()), "broken");
  EXPECT_TRUE(before);
  EXPECT_FALSE(after);
  EXPECT_EQ(error_of(bystander.record()), "");
  EXPECT_TRUE(bystander.error() == nullptr);
}

TEST(Queue, AnEventBeforeTheFailureDoesNotSpreadIt) {
  Queue first("first"), second("second");
  Gate gate;
  first.enqueue([&] { gate.wait(); });
  const Event good = first.record();
  first.enqueue([] { throw std::runtime_error("late"); });
  gate.open();
  EXPECT_EQ(error_of(first.record()), "late");
  second.wait(good);
  EXPECT_EQ(error_of(second.record()), "");
}

// Q4
TEST_P(QueueWithDelays, DestructionRunsEverything) {
  int ran = 0;
  Event end;
  {
    Queue queue("ending", delays(10));
    for (int job = 0; job < 50; ++job) queue.enqueue([&ran] { ++ran; });
    queue.enqueue([&] { queue.enqueue([&ran] { ++ran; }); });
    end = queue.record();
  }
  EXPECT_EQ(ran, 51);
  EXPECT_TRUE(end.complete());  // an event outlives its queue
}

TEST(Queue, DestructionAfterAFailureIsQuiet) {
  Event end;
  {
    Queue queue("ending");
    queue.enqueue([] { throw std::runtime_error("unseen"); });
    queue.enqueue([] {});
    end = queue.record();
  }
  EXPECT_EQ(error_of(end), "unseen");
}

TEST(Queue, ManyThreadsMayEnqueueAndWait) {
  Queue queue("shared");
  std::int64_t sum = 0;  // plain: only the queue's jobs touch it
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int job = 0; job < 100; ++job) {
        queue.enqueue([&sum] { ++sum; });
        if (job % 10 == 0) {
          EXPECT_TRUE(finish(queue.record()));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(finish(queue.record()));
  EXPECT_EQ(sum, 400);
}

TEST(Queue, CountsTheTimeOfJobsAndNotThatOfPausesAndWaits) {
  Queue gatekeeper("gatekeeper"), queue("busy", {1, 20'000});
  Gate gate;
  gatekeeper.enqueue([&] { gate.wait(); });
  queue.wait(gatekeeper.record());
  for (int job = 0; job < 5; ++job) {
    queue.enqueue([] { std::this_thread::sleep_for(milliseconds(4)); });
  }
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(queue.busy_seconds(), 0.0);
  const auto start = Clock::now();
  gate.open();
  ASSERT_TRUE(finish(queue.record()));
  const double wall = std::chrono::duration<double>(Clock::now() - start).count();
  EXPECT_GE(queue.busy_seconds(), 0.020);
  EXPECT_LT(queue.busy_seconds(), wall);
}

// 20 pauses of 0 to 2,000 us: 20 ms on average, and far more than nothing. Equal seeds pause alike.
TEST(Queue, DelaysPauseBeforeJobs) {
  const auto seconds_with = [](QueueDelays delays) {
    Queue queue("paused", delays);
    const auto start = Clock::now();
    for (int job = 0; job < 20; ++job) queue.enqueue([] {});
    EXPECT_TRUE(finish(queue.record()));
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  EXPECT_GE(seconds_with({1, 2'000}), 0.008);
  EXPECT_GE(seconds_with({2, 2'000}), 0.008);
}

// Neither an idle worker, nor one that waits for an event, nor a waiting host uses the processor.
TEST(Queue, NobodySpins) {
  Queue idle("idle"), blocked("blocked"), sleeping("sleeping");
  sleeping.enqueue([] { std::this_thread::sleep_for(milliseconds(300)); });
  blocked.wait(sleeping.record());
  const Event end = blocked.record();
  const std::clock_t start = std::clock();  // of all threads of this process
  ASSERT_TRUE(finish(end));
  const double used = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  EXPECT_LT(used, 0.1);
}

}  // namespace
}  // namespace tandem::kernels
