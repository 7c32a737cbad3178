// tandem/schedule.h: learning-rate schedules as pure functions of a position, and what lets one of
// them drive engines.
//
// S1 A schedule is a factor: the learning rate at position p is the rate that a parameter group had
//    when the LearningRateSchedule was made, times the schedule's value at p.
// S2 Positions are integers in a unit of the user's choice, from 0 to `total`. The update that
//    finds the position at p uses the value at p; total / (amount of an update) updates later the
//    position is `total`, whatever ranks and windows there are.
// S3 Both ends are exact: the value at 0 is the first one said, from `total` on it is `to`.
// S4 Only applied updates move a position: skipped, empty and failed steps do not.
#pragma once

#include <tandem/report.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace tandem {

class EngineBase;

/// How a value goes from one to another, t being the part of the way, in [0, 1].
enum class Curve : std::uint8_t {
  kLinear,        // t
  kCosine,        // (1 - cos(pi t)) / 2 (Loshchilov and Hutter, SGDR, 2017, equation 5)
  kOneMinusSqrt,  // sqrt(t) (Haegele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed
                  // Training Durations, 2024, "1-sqrt")
};

// Of each: `at(position)`, for a position >= 0; what lies behind `total` has the last value. Values
// are finite and >= 0, lengths in the schedule's unit. at() throws InvalidArgument for a position
// below 0 and for settings out of range.

struct ConstantSchedule {
  double value = 1.0;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// from + (to - from) p / total: torch.optim.lr_scheduler.LinearLR.
struct LinearSchedule {
  std::int64_t total = 0;  // > 0
  double from = 1.0;
  double to = 0.0;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// to + (from - to) (1 + cos(pi p / total)) / 2: CosineAnnealingLR (SGDR, equation 5), one period.
struct CosineSchedule {
  std::int64_t total = 0;  // > 0
  double from = 1.0;
  double to = 0.0;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// to + (from - to) (1 - p / total)^power: PolynomialLR, with an end of its own.
struct PolynomialSchedule {
  std::int64_t total = 0;  // > 0
  double power = 1.0;      // > 0
  double from = 1.0;
  double to = 0.0;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// Up from peak / divide_start to `peak`, then down to peak / divide_start / divide_end: OneCycleLR
/// (Smith and Topin, Super-Convergence, 2018) of two phases, with the same defaults. OneCycleLR
/// says its last value at its position total_steps - 1, which is `total` here, and its peak at
/// pct_start * total_steps - 1, which is `warmup`.
struct OneCycleSchedule {
  std::int64_t total = 0;   // > warmup
  std::int64_t warmup = 0;  // position of the peak, >= 0
  double peak = 1.0;
  double divide_start = 25.0;  // > 0
  double divide_end = 1e4;     // > 0
  Curve curve = Curve::kCosine;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// Linearly from `from` to `peak` over `warmup`, then by `curve` to `to`: what transformers calls
/// get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup. The first update of a
/// warm-up from 0 changes nothing but moments; say `from` if it should.
struct WarmupDecaySchedule {
  std::int64_t total = 0;   // > warmup
  std::int64_t warmup = 0;  // >= 0; 0: begins at the peak
  double from = 0.0;
  double peak = 1.0;
  double to = 0.0;
  Curve curve = Curve::kLinear;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// Warm-up, `peak`, and over the last `decay` positions by `curve` to `to`: WSD (Hu et al.,
/// MiniCPM, 2024).
struct WarmupStableDecaySchedule {
  std::int64_t total = 0;   // >= warmup + decay
  std::int64_t warmup = 0;  // >= 0
  std::int64_t decay = 0;   // > 0
  double from = 0.0;
  double peak = 1.0;
  double to = 0.0;
  Curve curve = Curve::kLinear;
  [[nodiscard]] double at(std::int64_t position) const;
};

/// Your own: called with positions >= 0, in any order.
using ScheduleFunction = std::function<double(std::int64_t position)>;

using Schedule = std::variant<ConstantSchedule,
                              LinearSchedule,
                              CosineSchedule,
                              PolynomialSchedule,
                              OneCycleSchedule,
                              WarmupDecaySchedule,
                              WarmupStableDecaySchedule,
                              ScheduleFunction>;

[[nodiscard]] double value_at(const Schedule& schedule, std::int64_t position);

/// What positions count. All but updates are counted over all ranks.
enum class ScheduleUnit : std::uint8_t { kUpdates, kMicroBatches, kSamples, kTokens };

/// What one update took from the data, on all ranks together; the same numbers on every rank.
/// Micro-batches: GradientAccumulation::joint_micro_batches(). Samples and tokens: what the program
/// knows, or world.sum() of each rank's.
struct Consumed {
  std::optional<std::int64_t> micro_batches = std::nullopt;
  std::optional<std::int64_t> samples = std::nullopt;
  std::optional<std::int64_t> tokens = std::nullopt;
};

struct ScheduleOptions {
  ScheduleUnit unit = ScheduleUnit::kUpdates;
  /// Parameter groups that are driven, and nothing else of the engines; empty: everything.
  std::vector<std::string> groups = {};
  /// Parameter groups that are left alone (with the learning rate that they have now), because they
  /// stay as they are or have a schedule of their own.
  std::vector<std::string> without = {};
};

/// A schedule and its position, over one or several engines. Sets their learning rates when made
/// and at each move; parameter groups with a learning rate of their own keep its ratio to their
/// engine's. Not collective: every rank makes the same one and moves it by the same amounts
/// (learning rates are compared at the step). What is set between moves (Engine::set_learning_rate,
/// torch's schedulers) lasts until the next move.
///
/// To go on after a restart: engines with the options of the first run, this schedule over them,
/// then set_position() with the position that was saved.
///
/// Thread safety: as World. The engines outlive it.
class LearningRateSchedule {
 public:
  /// Throws InvalidArgument: settings out of range, no engine, a group that an engine has not,
  /// groups named both ways.
  LearningRateSchedule(std::vector<EngineBase*> engines,
                       Schedule schedule,
                       const ScheduleOptions& options = {});

  /// Moves on by what the update took, if `result` applied one to any of the engines, and by
  /// nothing else; true if it did. Throws InvalidArgument if `consumed` lacks the unit's number
  /// (updates count themselves), or if that is below 0.
  bool advance(const StepResult& result, const Consumed& consumed = {});

  [[nodiscard]] std::int64_t position() const { return position_; }
  /// Goes there at once. Throws InvalidArgument below 0.
  void set_position(std::int64_t position);
  /// The factor at the position.
  [[nodiscard]] double value() const { return value_at(schedule_, position_); }

 private:
  struct Rate {
    EngineBase* engine = nullptr;
    std::optional<std::string> group;  // none: the engine's own settings
    double base = 0.0;
  };

  void set_rates() const;

  std::vector<EngineBase*> engines_;
  Schedule schedule_;
  ScheduleUnit unit_;
  std::vector<Rate> rates_;
  std::int64_t position_ = 0;
};

}  // namespace tandem
