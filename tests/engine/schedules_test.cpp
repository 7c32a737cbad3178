// tests/engine/schedules_test.cpp: schedules are what their formulas say, and exact at both ends.
#include <tandem/error.h>
#include <tandem/schedule.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace tandem {
namespace {

struct Ends {
  Schedule schedule;
  std::int64_t total;
  double first;
  double last;
};

/// Ends and lengths that no binary fraction is equal to.
std::vector<Ends> schedules_of(std::int64_t total) {
  std::vector<Ends> all;
  all.push_back({LinearSchedule{.total = total, .from = 0.1, .to = 0.7}, total, 0.1, 0.7});
  for (const double to : {0.0, 0.3}) {
    all.push_back({LinearSchedule{.total = total, .from = 0.7, .to = to}, total, 0.7, to});
    all.push_back({CosineSchedule{.total = total, .from = 0.7, .to = to}, total, 0.7, to});
    for (const double power : {0.3, 1.0, 3.0}) {
      all.push_back({PolynomialSchedule{.total = total, .power = power, .from = 0.7, .to = to},
                     total, 0.7, to});
    }
    for (const Curve curve : {Curve::kLinear, Curve::kCosine, Curve::kOneMinusSqrt}) {
      for (const std::int64_t warmup : {std::int64_t{0}, total / 3}) {
        const double first = warmup == 0 ? 0.9 : 0.1;
        all.push_back({WarmupDecaySchedule{.total = total,
                                           .warmup = warmup,
                                           .from = 0.1,
                                           .peak = 0.9,
                                           .to = to,
                                           .curve = curve},
                       total, first, to});
        all.push_back({WarmupStableDecaySchedule{.total = total,
                                                 .warmup = warmup,
                                                 .decay = total - total / 2,
                                                 .from = 0.1,
                                                 .peak = 0.9,
                                                 .to = to,
                                                 .curve = curve},
                       total, first, to});
      }
    }
  }
  return all;
}

TEST(Schedules, ExactAtBothEndsAndBehindThem) {
  for (const std::int64_t total : {3, 7, 1000, 999983}) {
    for (const Ends& ends : schedules_of(total)) {
      SCOPED_TRACE(std::to_string(total) + ", kind " + std::to_string(ends.schedule.index()));
      EXPECT_EQ(value_at(ends.schedule, 0), ends.first);
      if (total <= 1000) {  // of a longer one the last position but one may round to the end
        EXPECT_NE(value_at(ends.schedule, total - 1), ends.last);
      }
      EXPECT_EQ(value_at(ends.schedule, total), ends.last);
      EXPECT_EQ(value_at(ends.schedule, total + 5), ends.last);
    }
  }
}

TEST(Schedules, OfOnePosition) {
  for (const Ends& ends : schedules_of(1)) {
    EXPECT_EQ(value_at(ends.schedule, 1), ends.last);
  }
}

TEST(Schedules, Constant) {
  EXPECT_EQ(ConstantSchedule{}.at(17), 1.0);
  EXPECT_EQ(ConstantSchedule{.value = 0.25}.at(0), 0.25);
}

TEST(Schedules, Linear) {
  const LinearSchedule schedule{.total = 8, .from = 1.0, .to = 0.5};
  EXPECT_EQ(schedule.at(2), 0.875);
  EXPECT_EQ(schedule.at(4), 0.75);
}

// cos(pi / 4) = sqrt(1/2), cos(pi / 2) = 0.
TEST(Schedules, Cosine) {
  const CosineSchedule schedule{.total = 8, .from = 1.0, .to = 0.2};
  EXPECT_NEAR(schedule.at(2), 0.2 + 0.8 * (1.0 + std::sqrt(0.5)) / 2.0, 1e-15);
  EXPECT_NEAR(schedule.at(4), 0.6, 1e-15);
}

TEST(Schedules, Polynomial) {
  const PolynomialSchedule schedule{.total = 4, .power = 2.0};
  EXPECT_EQ(schedule.at(1), 0.5625);  // (3/4)^2
  EXPECT_EQ(schedule.at(2), 0.25);
  EXPECT_EQ(schedule.at(3), 0.0625);
}

// What torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=10, pct_start=0.3) says by its
// formula: its up phase ends at 0.3 * 10 - 1 = 2, its last step is 9; between them
// end + (start - end) / 2 * (1 + cos(pi t)).
TEST(Schedules, OneCycle) {
  const OneCycleSchedule schedule{.total = 9, .warmup = 2};
  EXPECT_EQ(schedule.at(0), 0.04);
  EXPECT_NEAR(schedule.at(1), 0.52, 1e-15);
  EXPECT_EQ(schedule.at(2), 1.0);
  const double end = 0.04 / 1e4;
  for (int p = 3; p < 9; ++p) {
    EXPECT_NEAR(schedule.at(p), end + (1.0 - end) / 2.0 * (1.0 + std::cos(M_PI * (p - 2) / 7.0)),
                1e-15);
  }
  EXPECT_EQ(schedule.at(9), end);
}

TEST(Schedules, WarmupAndDecay) {
  const WarmupDecaySchedule schedule{.total = 12, .warmup = 4};
  const double expected[] = {0.0,   0.25, 0.5,   0.75, 1.0,   0.875, 0.75,
                             0.625, 0.5,  0.375, 0.25, 0.125, 0.0};
  for (int p = 0; p <= 12; ++p) {
    EXPECT_EQ(schedule.at(p), expected[p]) << p;
  }
}

// 1 - sqrt(t) at t = 1/4 and 9/16.
TEST(Schedules, WarmupStableDecay) {
  const WarmupStableDecaySchedule schedule{
      .total = 30, .warmup = 2, .decay = 16, .curve = Curve::kOneMinusSqrt};
  EXPECT_EQ(schedule.at(1), 0.5);
  EXPECT_EQ(schedule.at(2), 1.0);
  EXPECT_EQ(schedule.at(13), 1.0);
  EXPECT_EQ(schedule.at(14), 1.0);
  EXPECT_EQ(schedule.at(18), 0.5);
  EXPECT_EQ(schedule.at(23), 0.25);
  EXPECT_EQ(schedule.at(30), 0.0);
}

TEST(Schedules, YourOwn) {
  const Schedule schedule = [](std::int64_t position) { return 1.0 / double(1 + position); };
  EXPECT_EQ(value_at(schedule, 3), 0.25);
  EXPECT_THROW(static_cast<void>(value_at(ScheduleFunction(), 0)), InvalidArgument);
}

TEST(Schedules, RefuseWhatIsOutOfRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<Schedule> wrong{
      ConstantSchedule{.value = -1.0},
      ConstantSchedule{.value = nan},
      LinearSchedule{},
      LinearSchedule{.total = 5, .to = -0.1},
      CosineSchedule{.total = -1},
      CosineSchedule{.total = 5, .from = nan},
      PolynomialSchedule{},
      PolynomialSchedule{.total = 5, .power = 0.0},
      OneCycleSchedule{.total = 5, .warmup = 5},
      OneCycleSchedule{.total = 5, .divide_start = 0.0},
      OneCycleSchedule{.total = 5, .divide_end = nan},
      WarmupDecaySchedule{.total = 5, .warmup = 5},
      WarmupDecaySchedule{.total = 5, .warmup = -1},
      WarmupStableDecaySchedule{.total = 5, .warmup = 3, .decay = 3},
      WarmupStableDecaySchedule{.total = 5, .warmup = 3},
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    EXPECT_THROW(static_cast<void>(value_at(wrong[i], 0)), InvalidArgument) << i;
  }
  EXPECT_THROW(static_cast<void>(LinearSchedule{.total = 5}.at(-1)), InvalidArgument);
}

}  // namespace
}  // namespace tandem
