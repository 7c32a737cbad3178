// tests/integration/gpu_faults_test.cpp: whole engines on simulated GPUs whose NCCL fails. Every
// rank hears of it with NCCL's words, within the world's timeout where nothing else tells, and at
// once where something does; nothing hangs, not the user's stream and not the world's end.
#include "engine/in_process.h"
#include "tests/support/fake_nccl.h"
#include "tests/support/models.h"
#include "tests/support/simulated_lanes.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace tandem::testing {
namespace {

using test_support::FakeNccl;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using ScaleEngine = Engine<std::shared_ptr<Scale>>;

constexpr int kRanks = 3;
constexpr int kFaulty = 1;
/// For what only a deadline ends.
constexpr std::chrono::milliseconds kTimeout{1500};
/// For what must not need one.
constexpr std::chrono::minutes kLongTimeout{2};
// A loaded machine may wake a waiter late; a wait without an end, or to the long timeout, would be
// longer than this.
constexpr std::chrono::seconds kMuchLater{30};

/// Five blocks of parameters in one bucket, of which each of the three ranks owns some: a reduction
/// is one group of NCCL's, of six calls, and so is a gather.
constexpr std::int64_t kNumel = 5000;
constexpr std::int64_t kCallsOfAReduction = 6;

/// What a rank's call threw.
enum class Threw : std::uint8_t { kNothing, kTimeout, kDeviceError, kWorldBroken };
struct Outcome {
  Threw threw = Threw::kNothing;
  std::string text;
};

Outcome outcome_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Timeout& error) {
    return {Threw::kTimeout, error.what()};
  } catch (const DeviceError& error) {
    return {Threw::kDeviceError, error.what()};
  } catch (const WorldBroken& error) {
    return {Threw::kWorldBroken, error.what()};
  }
  return {};
}

bool comes(const std::function<bool()>& condition) {
  const auto until = Clock::now() + kMuchLater;
  while (!condition()) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

void train(World& world, ScaleEngine& net) {
  net.forward(torch::ones({kNumel})).sum().backward();
  world.step();
}

void expect_refusals(World& world, ScaleEngine& net) {
  EXPECT_THROW(world.step(), WorldBroken);
  EXPECT_THROW(static_cast<void>(world.sum(1.0)), WorldBroken);
  EXPECT_THROW(net.forward(torch::ones({kNumel})).sum().backward(), WorldBroken);
  EXPECT_THROW(ScaleEngine(world, std::make_shared<Scale>(1, 0.0), {.name = "other"}), WorldBroken);
}

class GpuFaults : public ::testing::Test {
 protected:
  /// Runs `body` on each rank with an engine of kNumel parameters, and sees to it that nothing
  /// hangs, the worlds' end included.
  void on_gpus(std::chrono::milliseconds timeout,
               TorchWork torch_work,
               const std::function<void(World&, ScaleEngine&)>& body) {
    const WorldOptions options{.timeout = timeout};
    const auto begin = Clock::now();
    on_threads(
        engine::make_in_process(
            kRanks, options, simulated_lanes({.nccl = nccl_, .torch_work = torch_work}, options)),
        [&](World& world) {
          ScaleEngine net(world, std::make_shared<Scale>(kNumel, 0.0), {.name = "net"});
          static_cast<void>(world.sum(0.0));  // every rank has its engine before anything fails
          body(world, net);
        });
    EXPECT_LT(Clock::now() - begin, kMuchLater) << "the end of the worlds included";
    for (int rank = 0; rank < kRanks; ++rank) {
      // One may be on its way when the progress thread aborts.
      EXPECT_LE(nccl_->calls_after_abort(rank), 1) << rank;
      EXPECT_EQ(nccl_->groups_under_way(rank), 0) << rank;
    }
  }

  /// The faulty rank's `group`-th group from now on does not end: 0 is the next reduction, 1 the
  /// gather after it.
  void hang(const World& world, std::int64_t group) {
    if (world.rank() != kFaulty) return;
    nccl_->set_faults(kFaulty, {.hanging_group = nccl_->groups(kFaulty) + group});
  }

  [[nodiscard]] int ranks_that_threw(Threw what) const {
    int ranks = 0;
    for (const Outcome& outcome : outcomes_) ranks += outcome.threw == what ? 1 : 0;
    return ranks;
  }
  Outcome& of(const World& world) { return outcomes_.at(static_cast<std::size_t>(world.rank())); }

  /// `words` are said on all ranks: by DeviceError on the faulty one, unless its progress thread
  /// found out first and broke the world; on the others as what broke it.
  void expect_words_everywhere(const std::string& words) const {
    for (std::size_t rank = 0; rank < outcomes_.size(); ++rank) {
      const bool faulty = rank == static_cast<std::size_t>(kFaulty);
      EXPECT_TRUE(outcomes_[rank].threw == Threw::kWorldBroken ||
                  (faulty && outcomes_[rank].threw == Threw::kDeviceError))
          << rank;
      EXPECT_THAT(outcomes_[rank].text, HasSubstr(words)) << rank;
    }
  }

  const std::shared_ptr<FakeNccl> nccl_ = std::make_shared<FakeNccl>(kRanks);
  std::array<Outcome, kRanks> outcomes_;
};

TEST_F(GpuFaults, AReductionThatHangsEndsByTheTimeout) {
  on_gpus(kTimeout, TorchWork::kInTurn, [&](World& world, ScaleEngine& net) {
    hang(world, 0);
    of(world) = outcome_of([&] { train(world, net); });
    expect_refusals(world, net);
  });
  EXPECT_GE(ranks_that_threw(Threw::kTimeout), 1);
  EXPECT_EQ(ranks_that_threw(Threw::kTimeout) + ranks_that_threw(Threw::kWorldBroken), kRanks);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_GE(nccl_->aborts(rank), 1) << rank;
}

// NCCL's own thread never takes the group: it is the queue's thread that waits.
TEST_F(GpuFaults, AGroupThatIsNotTakenEndsByTheTimeout) {
  on_gpus(kTimeout, TorchWork::kInTurn, [&](World& world, ScaleEngine& net) {
    if (world.rank() == kFaulty) {
      nccl_->set_faults(kFaulty, {.untaken_group = nccl_->groups(kFaulty)});
    }
    of(world) = outcome_of([&] { train(world, net); });
    expect_refusals(world, net);
  });
  EXPECT_GE(ranks_that_threw(Threw::kTimeout), 1);
  EXPECT_EQ(ranks_that_threw(Threw::kTimeout) + ranks_that_threw(Threw::kWorldBroken), kRanks);
}

// The step has returned; only the user's stream waits for the gather, and it is freed.
TEST_F(GpuFaults, AGatherThatHangsBreaksTheWorldWithoutACall) {
  on_gpus(kTimeout, TorchWork::kAtOnce, [&](World& world, ScaleEngine& net) {
    hang(world, 1);
    of(world) = outcome_of([&] { train(world, net); });
    const int rank = world.rank();
    EXPECT_TRUE(comes([&] { return nccl_->aborts(rank) > 0; }));
    EXPECT_TRUE(comes([&] { return nccl_->groups_under_way(rank) == 0; }));
    EXPECT_THAT(outcome_of([&] { world.step(); }).text, HasSubstr("parameters after step 1"));
    expect_refusals(world, net);
  });
  EXPECT_EQ(ranks_that_threw(Threw::kNothing), kRanks);
}

TEST_F(GpuFaults, AnAsynchronousErrorIsSaidInNcclsWords) {
  const std::string words = "unhandled system error (run with NCCL_DEBUG=INFO)";
  on_gpus(kLongTimeout, TorchWork::kInTurn, [&](World& world, ScaleEngine& net) {
    if (world.rank() == kFaulty) nccl_->report_async_error(kFaulty, words);
    of(world) = outcome_of([&] { train(world, net); });
    expect_refusals(world, net);
  });
  expect_words_everywhere(words);
}

TEST_F(GpuFaults, AnAsynchronousErrorEndsAWaitForTheDevice) {
  const std::string words = "remote process exited or there was a network error";
  on_gpus(kLongTimeout, TorchWork::kInTurn, [&](World& world, ScaleEngine& net) {
    hang(world, 0);
    std::thread reporter;
    if (world.rank() == kFaulty) {
      reporter = std::thread([&] {
        EXPECT_TRUE(comes([&] { return nccl_->groups_under_way(kFaulty) > 0; }));
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the step waits by then
        nccl_->report_async_error(kFaulty, words);
      });
    }
    of(world) = outcome_of([&] { train(world, net); });
    if (reporter.joinable()) reporter.join();
    expect_refusals(world, net);
  });
  expect_words_everywhere(words);
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_GE(nccl_->aborts(rank), 1) << rank;
}

class GpuFaultsAtACall : public GpuFaults, public ::testing::WithParamInterface<std::int64_t> {};

TEST_P(GpuFaultsAtACall, IsSaidInNcclsWords) {
  on_gpus(kLongTimeout, TorchWork::kInTurn, [&](World& world, ScaleEngine& net) {
    if (world.rank() == kFaulty) {
      nccl_->set_faults(kFaulty, {.failing_call = nccl_->calls(kFaulty) + GetParam()});
    }
    of(world) = outcome_of([&] { train(world, net); });
    expect_refusals(world, net);
  });
  expect_words_everywhere("failed");
  expect_words_everywhere("fake NCCL: ");
}

// group_start, the first send, group_end.
INSTANTIATE_TEST_SUITE_P(OfAReduction,
                         GpuFaultsAtACall,
                         ::testing::Values(0, 1, kCallsOfAReduction - 1));

// The other ranks' gathers are under way then, and perhaps their steps have returned.
TEST_F(GpuFaults, ACallThatFailsInAGatherBreaksTheWorldEverywhere) {
  on_gpus(kLongTimeout, TorchWork::kAtOnce, [&](World& world, ScaleEngine& net) {
    const int rank = world.rank();
    if (rank == kFaulty) {
      nccl_->set_faults(kFaulty, {.failing_call = nccl_->calls(kFaulty) + kCallsOfAReduction});
    }
    of(world) = outcome_of([&] { train(world, net); });
    if (rank == kFaulty) {
      EXPECT_EQ(of(world).threw, Threw::kDeviceError);
      EXPECT_THAT(of(world).text, HasSubstr("fake NCCL: group_start failed"));
    } else {
      EXPECT_TRUE(comes([&] { return nccl_->aborts(rank) > 0; }));
      EXPECT_THAT(outcome_of([&] { world.step(); }).text, HasSubstr("group_start failed"));
    }
    EXPECT_TRUE(comes([&] { return nccl_->groups_under_way(rank) == 0; }));
    expect_refusals(world, net);
  });
}

TEST_F(GpuFaults, ARankThatCannotJoinIsSaidOnAllRanks) {
  nccl_->set_faults(kFaulty, {.join = true});
  const WorldOptions options{.timeout = kTimeout};
  const auto begin = Clock::now();
  on_threads(engine::make_in_process(kRanks, options, simulated_lanes({.nccl = nccl_}, options)),
             [&](World& world) {
               of(world) = outcome_of([&] {
                 const ScaleEngine net(world, std::make_shared<Scale>(kNumel, 0.0),
                                       {.name = "net"});
               });
               EXPECT_THROW(world.step(), WorldBroken);
             });
  EXPECT_LT(Clock::now() - begin, kMuchLater);
  for (const Outcome& outcome : outcomes_) {
    EXPECT_EQ(outcome.threw, Threw::kDeviceError);
    EXPECT_EQ(outcome.text, outcomes_[0].text);
    EXPECT_THAT(outcome.text, AllOf(HasSubstr("rank 1"), HasSubstr("fake NCCL: joining failed")));
  }
}

}  // namespace
}  // namespace tandem::testing
