// engine/joint_norm.cpp: the norm of a step's gradients, of each engine and of all of them: vector
// p-norms over all elements, each parameter once, as torch.nn.utils.clip_grad_norm_ defines them.
//
// The same bits for every number of ranks and every cut into buckets (kernels/norm.h and powers.h).
// For p = 2, p <= 1 and infinity gradients are read once and ranks exchange one small message; for
// other p twice: the largest magnitudes first, by which the others are divided.
#include "engine/step_part.h"
#include "engine/stopwatch.h"
#include "engine/world_state.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace tandem::engine {

namespace {

/// (sum of norm^p)^(1 / p) over engines; one norm alone is itself. NaN if any is.
double norm_over(const std::vector<double>& norms, double p) {
  double largest = 0.0;
  std::int64_t positive = 0;
  for (const double norm : norms) {
    if (!std::isfinite(norm)) {
      return std::numeric_limits<double>::quiet_NaN();
    }
    largest = std::max(largest, norm);
    positive += norm > 0.0 ? 1 : 0;
  }
  if (positive <= 1 || !std::isfinite(p)) {
    return largest;
  }
  const kernels::Power power = kernels::power_of(p, largest);
  double sum = 0.0;
  for (const double norm : norms) {
    sum += kernels::term_of(norm, power);
  }
  return kernels::norm_of(sum, power);
}

}  // namespace

void WorldState::joint_norm(Lock& lock, double p, std::vector<Part>& parts, StepResult& result) {
  const TraceSpan span(*trace_, "norm", Trace::Row::kUser);
  Stopwatch watch;
  const bool largest = kernels::needs_largest(p);
  if (largest) {
    for (Part& part : parts) {
      if (!part.unseen) {
        part.core->shard->find_largest(*part.core->lane->step, part.seen);
      }
    }
  } else {
    start_sums(p, parts);
  }
  double waited = 0.0;               // for reductions
  for (const auto& lane : lanes_) {  // the one time in a step that the host waits for a device
    const kernels::Mark done = lane->step->record();
    await_mark(*lane, done, "the reductions and their norm, on " + lane->where.str());
    result.times.reduction += lane->take_reductions(done, *trace_);
    waited += lane->reductions_done.seconds_since(lane->asked);
  }
  if (largest) {
    share_largest(lock, parts);
  }
  if (largest && std::isfinite(p)) {  // and the other time
    start_sums(p, parts);
    for (const auto& lane : lanes_) {
      await_mark(*lane, lane->step->record(), "the norm, on " + lane->where.str());
    }
  }
  if (std::isfinite(p)) {
    share_sums(lock, parts);
  }

  std::vector<double> norms;
  bool common = true;
  for (const Part& part : parts) {
    EngineStep engine;
    engine.name = part.core->name;
    engine.passes = part.core->window.passes;
    engine.pairs = part.core->window.pairs;
    engine.tokens = part.tokens;
    engine.parameters = std::count(part.seen.begin(), part.seen.end(), true);
    if (!part.unseen) {
      engine.denominator = part.averaging.denominator;
      engine.multiplier = part.averaging.multiplier;
      engine.finite = std::isfinite(p) ? part.sum.nonfinite() == 0 : std::isfinite(part.largest);
      const double raw =
          std::isfinite(p) ? kernels::norm_of(part.sum.value(), part.power) : part.largest;
      engine.norm = engine.finite ? std::abs(part.averaging.scaled(raw))
                                  : std::numeric_limits<double>::quiet_NaN();
      norms.push_back(engine.norm);
      common = common && (result.denominator == 0.0 || result.denominator == engine.denominator);
      result.denominator = engine.denominator;
    }
    result.engines.push_back(std::move(engine));
  }
  result.norm = norm_over(norms, p);
  result.denominator = common ? result.denominator : 0.0;
  result.times.exposed += waited;
  result.times.norm = std::max(0.0, watch.lap() - waited);
}

/// Of this rank's slices.
void WorldState::start_sums(double p, std::vector<Part>& parts) {
  for (Part& part : parts) {
    part.power = kernels::power_of(p, part.largest);
    if (part.unseen) {
      continue;
    }
    if (p == 2.0) {
      part.core->shard->sum_squares(*part.core->lane->step, part.seen);
    } else {
      part.core->shard->sum_powers(*part.core->lane->step, part.seen, part.power);
    }
  }
}

/// A rank without gradients says 0.
void WorldState::share_largest(Lock& lock, std::vector<Part>& parts) {
  comm::Message words;
  for (const Part& part : parts) {
    words.maxs.push_back(part.unseen ? 0 : part.core->shard->largest());
  }
  const comm::Message merged =
      await_message(lock, control_->post(words), "the other ranks' largest gradients");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].largest = kernels::magnitude_of(static_cast<std::uint32_t>(merged.maxs[i]));
  }
}

void WorldState::share_sums(Lock& lock, std::vector<Part>& parts) {
  comm::Message words;
  for (Part& part : parts) {
    if (!part.unseen) {
      part.core->shard->add_sum_to(part.sum);
    }
    part.sum.normalize();
    const auto mine = part.sum.words();
    words.sums.insert(words.sums.end(), mine.begin(), mine.end());
  }
  const comm::Message merged =
      await_message(lock, control_->post(words), "the other ranks' part of the joint norm");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::copy_n(
        merged.sums.begin() + static_cast<std::ptrdiff_t>(i * kernels::Superaccumulator::kWords),
        kernels::Superaccumulator::kWords, parts[i].sum.words().begin());
  }
}

}  // namespace tandem::engine
