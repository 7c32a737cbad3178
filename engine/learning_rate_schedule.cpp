// engine/learning_rate_schedule.cpp: a schedule over engines; see tandem/schedule.h.
#include <tandem/engine.h>
#include <tandem/error.h>
#include <tandem/schedule.h>

#include <algorithm>
#include <utility>

namespace tandem {

namespace {

/// The update's size in `unit`. Throws InvalidArgument if it was not said.
std::int64_t amount_of(const Consumed& consumed, ScheduleUnit unit) {
  const auto said = [](const std::optional<std::int64_t>& amount, const char* name) {
    if (!amount) {
      throw InvalidArgument(std::string("LearningRateSchedule::advance: the schedule counts ") +
                            name + ", and Consumed does not say how many the update took");
    }
    if (*amount < 0) {
      throw InvalidArgument("LearningRateSchedule::advance: an update of " +
                            std::to_string(*amount) + " " + name + "; it is >= 0");
    }
    return *amount;
  };
  switch (unit) {
    case ScheduleUnit::kUpdates:
      return 1;
    case ScheduleUnit::kMicroBatches:
      return said(consumed.micro_batches, "micro-batches");
    case ScheduleUnit::kSamples:
      return said(consumed.samples, "samples");
    case ScheduleUnit::kTokens:
      return said(consumed.tokens, "tokens");
  }
  return 0;
}

}  // namespace

LearningRateSchedule::LearningRateSchedule(std::vector<EngineBase*> engines,
                                           Schedule schedule,
                                           const ScheduleOptions& options)
    : engines_(std::move(engines)), schedule_(std::move(schedule)), unit_(options.unit) {
  if (engines_.empty() || std::count(engines_.begin(), engines_.end(), nullptr) > 0) {
    throw InvalidArgument("LearningRateSchedule: it drives at least one engine, and none is null");
  }
  if (!options.groups.empty() && !options.without.empty()) {
    throw InvalidArgument("LearningRateSchedule: `groups` and `without` were given; give one");
  }
  (void)value();  // settings out of range are refused now
  for (EngineBase* engine : engines_) {
    for (const std::string& group : options.groups) {
      rates_.push_back({engine, group, engine->learning_rate(group)});
    }
    if (!options.groups.empty()) {
      continue;
    }
    for (const std::string& group : options.without) {
      engine->set_learning_rate(engine->learning_rate(group), group);  // follows nobody from now on
    }
    rates_.push_back({engine, std::nullopt, engine->learning_rate()});
    for (const std::string& group : engine->groups()) {
      const bool left_alone = std::count(options.without.begin(), options.without.end(), group) > 0;
      if (!left_alone && engine->has_own_learning_rate(group)) {
        rates_.push_back({engine, group, engine->learning_rate(group)});
      }
    }
  }
  set_rates();
}

bool LearningRateSchedule::advance(const StepResult& result, const Consumed& consumed) {
  const std::int64_t amount = amount_of(consumed, unit_);
  const bool ours =
      std::any_of(result.engines.begin(), result.engines.end(), [&](const EngineStep& stepped) {
        return stepped.denominator != 0.0 &&  // else it was not seen
               std::any_of(engines_.begin(), engines_.end(), [&](const EngineBase* engine) {
                 return engine->name() == stepped.name;
               });
      });
  if (!result.applied || !ours) {
    return false;
  }
  position_ += amount;
  set_rates();
  return true;
}

void LearningRateSchedule::set_position(std::int64_t position) {
  (void)value_at(schedule_, position);
  position_ = position;
  set_rates();
}

void LearningRateSchedule::set_rates() const {
  const double factor = value();
  for (const Rate& rate : rates_) {
    if (rate.group) {
      rate.engine->set_learning_rate(rate.base * factor, *rate.group);
    } else {
      rate.engine->set_learning_rate(rate.base * factor);
    }
  }
}

}  // namespace tandem
