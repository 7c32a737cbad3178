// tests/integration/schedules_test.cpp: what moves a learning rate, and how far: LibTorch's
// schedulers under accumulation, and schedules over engines.
#include "tests/support/number.h"
#include "tests/support/thread_world.h"

#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One backward of the micro-batch; on the last rank of `gradient`, on the others of 1.
void pass(World& world, ScaleEngine& net, double gradient = 1.0) {
  gradient_of(net, world.rank() + 1 == world.size() ? gradient : 1.0).backward();
}

/// Halvings of the learning rate seen after each window of two epochs of 5 micro-batches on each
/// rank, in windows of 2 (2, 2 and a tail of 1), under StepLR of size 4 and gamma 1/2, whose step()
/// is called every micro-batch. LibTorch's StepLR halves at its calls 5, 9, 13, ...: after n calls
/// floor((n - 1) / 4) times. `skipped`: index of a window with an infinity on one rank, or -1.
std::vector<int> halvings(World& world, AccumulationOptions options, int skipped = -1) {
  auto net = number(world, "net");
  options.steps = 2;
  GradientAccumulation accumulation(world, options);
  torch::optim::StepLR inner(net.optimizer(), 4, 0.5);
  AccumulationScheduler scheduler(inner, accumulation);
  std::vector<int> seen;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for ([[maybe_unused]] const int& element : accumulation.epoch(std::vector<int>(5))) {
      const double before = net.learning_rate();
      const auto window = static_cast<int>(seen.size());
      pass(world, net, window == skipped ? kInfinity : 1.0);
      if (accumulation.boundary()) {
        EXPECT_EQ(world.step().applied, window != skipped);
      }
      scheduler.step();
      if (accumulation.boundary()) {
        seen.push_back(static_cast<int>(-std::log2(net.learning_rate())));
      } else {
        EXPECT_EQ(net.learning_rate(), before) << "moved in the middle of a window";
      }
    }
  }
  return seen;
}

/// Windows of two epochs, for worlds of 1, 2, 3 and 4.
using Table = std::array<std::vector<int>, 4>;

void expect_halvings(const AccumulationOptions& options, const Table& table, int skipped = -1) {
  on_ranks(patient(), [&](World& world) {
    EXPECT_EQ(halvings(world, options, skipped),
              table.at(static_cast<std::size_t>(world.size() - 1)));
  });
}

// Inner steps are micro-batches x ranks: windows of 2, 2, 1, 2, 2, 1 make n = 2, 4, 5, 7, 9, 10
// calls with one rank, and W times as many with W.
TEST(AccumulationScheduler, MovesByMicroBatchesTimesRanks) {
  expect_halvings({}, {{{0, 0, 1, 1, 2, 2},     // n =  2,  4,  5 |  7,  9, 10
                        {0, 1, 2, 3, 4, 4},     //      4,  8, 10 | 14, 18, 20
                        {1, 2, 3, 5, 6, 7},     //      6, 12, 15 | 21, 27, 30
                        {1, 3, 4, 6, 8, 9}}});  //      8, 16, 20 | 28, 36, 40
}

TEST(AccumulationScheduler, LeavesRanksOutWhereOneBatchWasSplit) {
  const std::vector<int> alone{0, 0, 1, 1, 2, 2};
  expect_halvings({.split_batches = true}, {{alone, alone, alone, alone}});
}

// Every window makes n = W calls.
TEST(AccumulationScheduler, MovesByRanksOnlyWhereTheScheduleWasAdjusted) {
  expect_halvings({.adjust_scheduler = false}, {{{0, 0, 0, 0, 1, 1},     // n = 1, 2, 3, 4, 5, 6
                                                 {0, 0, 1, 1, 2, 2},     //     2, 4, ... 12
                                                 {0, 1, 2, 2, 3, 4},     //     3, 6, ... 18
                                                 {0, 1, 2, 3, 4, 5}}});  //     4, 8, ... 24
}

TEST(AccumulationScheduler, MovesByOneWhereAdjustedAndSplit) {
  const std::vector<int> alone{0, 0, 0, 0, 1, 1};
  expect_halvings({.adjust_scheduler = false, .split_batches = true},
                  {{alone, alone, alone, alone}});
}

// The second window is skipped: its two micro-batches do not count.
TEST(AccumulationScheduler, SkippedWindowsDoNotMoveIt) {
  expect_halvings({},
                  {{{0, 0, 0, 1, 1, 1},    // n = 2, 2,  3 |  5,  7,  8
                    {0, 0, 1, 2, 3, 3},    //     4, 4,  6 | 10, 14, 16
                    {1, 1, 2, 3, 5, 5},    //     6, 6,  9 | 15, 21, 24
                    {1, 1, 2, 4, 6, 7}}},  //     8, 8, 12 | 20, 28, 32
                  /*skipped=*/1);
  expect_halvings({.adjust_scheduler = false},
                  {{{0, 0, 0, 0, 0, 1},    // n = 1, 1, 2, 3, 4, 5
                    {0, 0, 0, 1, 1, 2},    //     2, 2, 4, 6, 8, 10
                    {0, 0, 1, 2, 2, 3},    //     3, 3, 6, 9, 12, 15
                    {0, 0, 1, 2, 3, 4}}},  //     4, 4, 8, 12, 16, 20
                  /*skipped=*/1);
}

// The tail is skipped: its one micro-batch does not count.
TEST(AccumulationScheduler, SkippedTailDoesNotMoveIt) {
  expect_halvings({},
                  {{{0, 0, 0, 1, 1, 2},    // n = 2,  4,  4 |  6,  8,  9
                    {0, 1, 1, 2, 3, 4},    //     4,  8,  8 | 12, 16, 18
                    {1, 2, 2, 4, 5, 6},    //     6, 12, 12 | 18, 24, 27
                    {1, 3, 3, 5, 7, 8}}},  //     8, 16, 16 | 24, 32, 36
                  /*skipped=*/2);
}

/// Counts its steps.
struct Counter {
  int steps = 0;
  void step() { ++steps; }
};

// Seldom or often called, it makes up for what was applied since, once.
TEST(AccumulationScheduler, CatchesUp) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 2});
    Counter often;
    Counter seldom;
    AccumulationScheduler each(often, accumulation);
    AccumulationScheduler at_the_end(seldom, accumulation);
    for ([[maybe_unused]] const int& element : accumulation.epoch(std::vector<int>(5))) {
      pass(world, net);
      each.step();
      if (accumulation.boundary()) {
        world.step();
      }
      each.step();
      each.step();
    }
    at_the_end.step();
    EXPECT_EQ(often.steps, 5 * world.size());
    EXPECT_EQ(seldom.steps, 5 * world.size());
  });
}

// A window that was given up and begun anew counts once, and one that held nothing does not.
TEST(AccumulationScheduler, RestartedAndEmptyWindows) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 2});
    Counter counter;
    AccumulationScheduler scheduler(counter, accumulation);
    accumulation.begin();
    pass(world, net);
    world.zero_grad();
    accumulation.restart();
    for (int i = 0; i < 2; ++i) {
      accumulation.begin();
      pass(world, net);
    }
    EXPECT_TRUE(world.step().applied);
    scheduler.step();
    EXPECT_EQ(counter.steps, 2 * world.size());
    accumulation.begin({.last_of_epoch = true});
    EXPECT_EQ(world.step().reason, StepReason::kEmpty);
    scheduler.step();
    EXPECT_EQ(counter.steps, 2 * world.size());
  });
}

// A critic that is stepped every micro-batch does not move what waits for the window's step.
TEST(AccumulationScheduler, StepsInsideAWindowDoNotMoveIt) {
  on_ranks(patient(), [](World& world) {
    auto critic = number(world, "critic");
    auto generator = number(world, "generator");
    GradientAccumulation accumulation(world, {.steps = 2});
    Counter counter;
    AccumulationScheduler scheduler(counter, accumulation);
    for (int i = 0; i < 2; ++i) {
      accumulation.begin();
      (gradient_of(critic, 1.0) + gradient_of(generator, 1.0)).backward();
      if (!accumulation.boundary()) {
        EXPECT_TRUE(world.step({.engines = {&critic}}).applied);
        scheduler.step();
        EXPECT_EQ(counter.steps, 0);
      }
    }
    world.step();
    scheduler.step();
    EXPECT_EQ(counter.steps, 2 * world.size());
  });
}

// Saying one metric several times would pass for no progress: one inner step a window.
TEST(AccumulationScheduler, MetricSchedulersMoveOnceAWindow) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 2});
    using Plateau = torch::optim::ReduceLROnPlateauScheduler;
    Plateau inner(net.optimizer(), Plateau::min, /*factor=*/0.5F, /*patience=*/1);
    AccumulationScheduler scheduler(inner, accumulation);
    std::vector<double> rates;
    // Best, worse, skipped, worse once too often.
    const double gradients[] = {1.0, 1.0, kInfinity, 1.0};
    for (const double gradient : gradients) {
      for (int i = 0; i < 2; ++i) {
        accumulation.begin();
        pass(world, net, gradient);
        if (accumulation.boundary()) {
          world.step();
        }
        scheduler.step(static_cast<float>(world.mean(7.0)));
      }
      rates.push_back(net.learning_rate());
    }
    EXPECT_THAT(rates, ElementsAre(1.0, 1.0, 1.0, 0.5));
  });
}

// The ranks of an uneven tail move differently, and the next step says so on all of them.
TEST(AccumulationScheduler, UnevenRanksAreFoundOut) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        GradientAccumulation accumulation(world, {.steps = 4});
        torch::optim::StepLR inner(net.optimizer(), 1, 0.5);
        AccumulationScheduler scheduler(inner, accumulation);
        for ([[maybe_unused]] const int& element :
             accumulation.epoch(std::vector<int>(world.rank() == 0 ? 2 : 1))) {
          pass(world, net);
          if (accumulation.boundary()) {
            EXPECT_TRUE(world.step().applied);
          }
          scheduler.step();
        }
        pass(world, net);
        EXPECT_THROW(world.step(), Mismatch);
        net.set_learning_rate(1.0);
        EXPECT_TRUE(world.step().applied);
      },
      2);
}

// --- schedules over engines ---

/// Learning rates of `steps` updates, the one after the last included; window `skipped` is not
/// finite.
std::vector<double> rates(
    World& world, ScaleEngine& net, LearningRateSchedule& schedule, int steps, int skipped = -1) {
  std::vector<double> seen{net.learning_rate()};
  for (int step = 0; step < steps; ++step) {
    pass(world, net, step == skipped ? kInfinity : 1.0);
    EXPECT_EQ(schedule.advance(world.step()), step != skipped);
    seen.push_back(net.learning_rate());
  }
  return seen;
}

TEST(LearningRateSchedule, MovesByAppliedUpdates) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    LearningRateSchedule schedule({&net}, LinearSchedule{.total = 4});
    EXPECT_THAT(rates(world, net, schedule, 5, /*skipped=*/2),
                ElementsAre(1.0, 0.75, 0.5, 0.5, 0.25, 0.0));
    EXPECT_FALSE(schedule.advance(world.step())) << "an empty step";
    EXPECT_EQ(schedule.position(), 4);
  });
}

// Windows of G with a tail, over three epochs of 7 micro-batches a rank: whatever G and W, the
// position ends at 21 W exactly, or at 21 where one batch was split over the ranks.
TEST(LearningRateSchedule, ReachesItsEndExactly) {
  on_ranks(patient(), [](World& world) {
    for (const std::int64_t steps : {1, 2, 3, 4, 7, 9}) {
      for (const bool split : {false, true}) {
        auto net = number(world, "net");
        const std::int64_t total = 21 * (split ? 1 : world.size());
        LearningRateSchedule schedule({&net}, CosineSchedule{.total = total, .to = 0.125},
                                      {.unit = ScheduleUnit::kMicroBatches});
        GradientAccumulation accumulation(world, {.steps = steps, .split_batches = split});
        for (int i = 0; i < 3; ++i) {
          for ([[maybe_unused]] const int& element : accumulation.epoch(std::vector<int>(7))) {
            EXPECT_GT(net.learning_rate(), 0.125);
            pass(world, net);
            if (accumulation.boundary()) {
              schedule.advance(world.step(), {.micro_batches = accumulation.joint_micro_batches()});
            }
          }
        }
        EXPECT_EQ(schedule.position(), total);
        EXPECT_EQ(net.learning_rate(), 0.125);
      }
    }
  });
}

TEST(LearningRateSchedule, CountsSamplesOrTokens) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    LearningRateSchedule by_tokens({&net}, LinearSchedule{.total = 100 * world.size()},
                                   {.unit = ScheduleUnit::kTokens});
    pass(world, net);
    const StepResult result = world.step();
    const auto tokens = static_cast<std::int64_t>(world.sum(25.0));
    EXPECT_TRUE(by_tokens.advance(result, {.samples = 3, .tokens = tokens}));
    EXPECT_EQ(net.learning_rate(), 0.75);
    EXPECT_THAT(refusal([&] { by_tokens.advance(result, {.samples = 3}); }), HasSubstr("tokens"));
    EXPECT_THAT(refusal([&] { by_tokens.advance(result, {.tokens = -1}); }), HasSubstr("-1"));
    EXPECT_EQ(by_tokens.position(), 25 * world.size());
    LearningRateSchedule by_samples({&net}, LinearSchedule{.total = 12},
                                    {.unit = ScheduleUnit::kSamples});
    EXPECT_TRUE(by_samples.advance(result, {.samples = 3}));
    EXPECT_EQ(net.learning_rate(), 0.75 * 0.75);
  });
}

EngineOptions with_groups() {
  EngineOptions options;
  options.name = "net";
  options.optimizer = Sgd{.lr = 1.0};
  options.groups = {{.name = "first", .where = name_matches("^first\\.weight"), .lr = 0.5},
                    {.name = "second", .where = name_matches("^second\\.weight")}};
  return options;
}

TEST(LearningRateSchedule, GroupsKeepTheirRatio) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1), with_groups());
    auto other = number(world, "other");
    other.set_learning_rate(0.25);
    LearningRateSchedule schedule({&net, &other}, LinearSchedule{.total = 4});
    schedule.set_position(1);
    EXPECT_EQ(net.learning_rate(), 0.75);
    EXPECT_EQ(net.learning_rate("first"), 0.375);
    EXPECT_EQ(net.learning_rate("second"), 0.75);
    EXPECT_FALSE(net.has_own_learning_rate("second"));
    EXPECT_EQ(other.learning_rate(), 0.1875);
    EXPECT_EQ(schedule.value(), 0.75);
  });
}

TEST(LearningRateSchedule, GroupsMayHaveTheirOwn) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1), with_groups());
    LearningRateSchedule rest({&net}, LinearSchedule{.total = 4}, {.without = {"second"}});
    LearningRateSchedule second({&net}, ConstantSchedule{.value = 2.0}, {.groups = {"second"}});
    rest.set_position(2);
    EXPECT_EQ(net.learning_rate(), 0.5);
    EXPECT_EQ(net.learning_rate("first"), 0.25);
    EXPECT_EQ(net.learning_rate("second"), 2.0);
  });
}

TEST(LearningRateSchedule, StepsOfOtherEnginesDoNotMoveIt) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    LearningRateSchedule schedule({&a}, LinearSchedule{.total = 4});
    pass(world, b);
    EXPECT_FALSE(schedule.advance(world.step({.engines = {&b}})));
    pass(world, b);
    EXPECT_FALSE(schedule.advance(world.step())) << "no pass reached a";
    pass(world, a);
    EXPECT_TRUE(schedule.advance(world.step()));
    EXPECT_EQ(a.learning_rate(), 0.75);
  });
}

TEST(LearningRateSchedule, RefusesBadInput) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, mlp(1), with_groups());
    const Schedule linear = LinearSchedule{.total = 4};
    EXPECT_THAT(refusal([&] { LearningRateSchedule({}, linear); }), HasSubstr("at least one"));
    EXPECT_THAT(refusal([&] { LearningRateSchedule({nullptr}, linear); }), HasSubstr("null"));
    EXPECT_THAT(refusal([&] { LearningRateSchedule({&net}, LinearSchedule{}); }),
                HasSubstr("total is > 0"));
    EXPECT_THAT(refusal([&] { LearningRateSchedule({&net}, linear, {.groups = {"third"}}); }),
                HasSubstr("'third'"));
    EXPECT_THAT(refusal([&] { LearningRateSchedule({&net}, linear, {.without = {"third"}}); }),
                HasSubstr("'third'"));
    EXPECT_THAT(refusal([&] {
                  LearningRateSchedule({&net}, linear,
                                       {.groups = {"first"}, .without = {"second"}});
                }),
                HasSubstr("give one"));
    LearningRateSchedule schedule({&net}, linear);
    EXPECT_THAT(refusal([&] { schedule.set_position(-1); }), HasSubstr("-1"));
    EXPECT_EQ(schedule.position(), 0);
  });
}

}  // namespace
}  // namespace tandem::testing
