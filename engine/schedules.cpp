// engine/schedules.cpp: the formulas of tandem/schedule.h.
//
// Everything is std::lerp(a, b, t) of a t in [0, 1], which is exactly a at 0 and exactly b at 1.
#include <tandem/error.h>
#include <tandem/schedule.h>

#include <cmath>
#include <numbers>
#include <type_traits>

namespace tandem {

namespace {

void require(bool holds, const char* schedule, const char* what) {
  if (!holds) {
    throw InvalidArgument(std::string(schedule) + ": " + what);
  }
}

void require_position(std::int64_t position) {
  if (position < 0) {
    throw InvalidArgument("a schedule's position is " + std::to_string(position) + "; it is >= 0");
  }
}

bool usable(double value) { return std::isfinite(value) && value >= 0.0; }

double way(Curve curve, double t) {
  switch (curve) {
    case Curve::kLinear:
      return t;
    case Curve::kCosine:
      return 0.5 * (1.0 - std::cos(std::numbers::pi * t));
    case Curve::kOneMinusSqrt:
      return std::sqrt(t);
  }
  return t;
}

/// From `a` to `b`, `done` of `length` positions on; behind them `b`.
double go(double a, double b, Curve curve, std::int64_t done, std::int64_t length) {
  if (done >= length) {
    return b;
  }
  return std::lerp(a, b, way(curve, static_cast<double>(done) / static_cast<double>(length)));
}

}  // namespace

double ConstantSchedule::at(std::int64_t position) const {
  require(usable(value), "ConstantSchedule", "value is finite and >= 0");
  require_position(position);
  return value;
}

double LinearSchedule::at(std::int64_t position) const {
  require(total > 0, "LinearSchedule", "total is > 0");
  require(usable(from) && usable(to), "LinearSchedule", "from and to are finite and >= 0");
  require_position(position);
  return go(from, to, Curve::kLinear, position, total);
}

double CosineSchedule::at(std::int64_t position) const {
  require(total > 0, "CosineSchedule", "total is > 0");
  require(usable(from) && usable(to), "CosineSchedule", "from and to are finite and >= 0");
  require_position(position);
  return go(from, to, Curve::kCosine, position, total);
}

double PolynomialSchedule::at(std::int64_t position) const {
  require(total > 0, "PolynomialSchedule", "total is > 0");
  require(std::isfinite(power) && power > 0.0, "PolynomialSchedule", "power is finite and > 0");
  require(usable(from) && usable(to), "PolynomialSchedule", "from and to are finite and >= 0");
  require_position(position);
  if (position >= total) {
    return to;
  }
  const double left = static_cast<double>(total - position) / static_cast<double>(total);
  return std::lerp(to, from, std::pow(left, power));
}

double OneCycleSchedule::at(std::int64_t position) const {
  require(warmup >= 0 && total > warmup, "OneCycleSchedule", "0 <= warmup < total");
  require(usable(peak), "OneCycleSchedule", "peak is finite and >= 0");
  require(std::isfinite(divide_start) && divide_start > 0.0, "OneCycleSchedule",
          "divide_start is finite and > 0");
  require(std::isfinite(divide_end) && divide_end > 0.0, "OneCycleSchedule",
          "divide_end is finite and > 0");
  require_position(position);
  const double start = peak / divide_start;
  return position < warmup ? go(start, peak, curve, position, warmup)
                           : go(peak, start / divide_end, curve, position - warmup, total - warmup);
}

double WarmupDecaySchedule::at(std::int64_t position) const {
  require(warmup >= 0 && total > warmup, "WarmupDecaySchedule", "0 <= warmup < total");
  require(usable(from) && usable(peak) && usable(to), "WarmupDecaySchedule",
          "from, peak and to are finite and >= 0");
  require_position(position);
  return position < warmup ? go(from, peak, Curve::kLinear, position, warmup)
                           : go(peak, to, curve, position - warmup, total - warmup);
}

double WarmupStableDecaySchedule::at(std::int64_t position) const {
  require(warmup >= 0 && decay > 0 && total >= warmup && total - warmup >= decay,
          "WarmupStableDecaySchedule", "warmup >= 0, decay > 0 and warmup + decay <= total");
  require(usable(from) && usable(peak) && usable(to), "WarmupStableDecaySchedule",
          "from, peak and to are finite and >= 0");
  require_position(position);
  if (position < warmup) {
    return go(from, peak, Curve::kLinear, position, warmup);
  }
  const std::int64_t stable_until = total - decay;
  return position < stable_until ? peak : go(peak, to, curve, position - stable_until, decay);
}

double value_at(const Schedule& schedule, std::int64_t position) {
  require_position(position);
  return std::visit(
      [&](const auto& one) {
        if constexpr (std::is_same_v<std::decay_t<decltype(one)>, ScheduleFunction>) {
          require(static_cast<bool>(one), "Schedule", "an empty function; give one");
          return one(position);
        } else {
          return one.at(position);
        }
      },
      schedule);
}

}  // namespace tandem
