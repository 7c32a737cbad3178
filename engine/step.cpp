// engine/step.cpp: the joint step. perform_step() is one step of training from top to bottom; what
// it calls follows in the same order. Every branch is decided by merged messages, so all ranks take
// the same one.
#include "engine/step_part.h"
#include "engine/stopwatch.h"
#include "engine/world_state.h"
#include <tandem/error.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace tandem::engine {

namespace {

/// Steps after which staging that no pass needed goes back to the system.
constexpr int kIdleSteps = 8;

/// torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
double clip_factor(double norm, double clip_norm) {
  return clip_norm > 0.0 ? std::min(1.0, clip_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace

StepResult WorldState::step(const std::vector<const EngineCore*>& engines,
                            std::optional<double> clip_norm,
                            double norm_type) {
  if (clip_norm && !(*clip_norm > 0.0 && std::isfinite(*clip_norm))) {
    throw InvalidArgument("World::step: clip_norm " + std::to_string(*clip_norm) +
                          "; it is finite and > 0, or not given");
  }
  if (!(norm_type > 0.0)) {
    throw InvalidArgument("World::step: norm_type " + std::to_string(norm_type) +
                          "; it is > 0, or infinity");
  }
  return guarded([&] {
    Lock lock(mutex_);
    const TraceSpan span(*trace_, "step", Trace::Row::kUser, {.update = updates_ + 1});
    resolve(lock);
    const std::string settings = adopt_settings();
    std::string problem = settle_parameters();
    if (problem.empty()) {
      problem = settings;
    }
    if (problem.empty()) {
      problem = read_tokens();
    }
    GateSay say;
    say.word = Word::kStep;
    say.step_engines.assign(cores_.size(), engines.empty());
    for (const EngineCore* core : engines) {
      auto bit = say.step_engines[static_cast<std::size_t>(core->index)];
      if (bit) {
        throw InvalidArgument("World::step: engine '" + core->name + "' is named twice");
      }
      bit = true;
    }
    for (const auto& core : cores_) {
      if (core->retired()) {
        say.step_engines[static_cast<std::size_t>(core->index)] = false;
      }
    }
    if (problem.empty()) {
      problem = gradient_set_by_hand(say.step_engines);
    }
    say.clip_norm = clip_norm.value_or(0.0);
    say.norm_type = norm_type;
    say.refused = !problem.empty();
    return perform_step(
        lock, agree(lock, say, say.refused ? refusal(problem) : std::vector<std::string>{}));
  });
}

/// Learning rates that code holding an engine's torch::optim::Optimizer has set. Returns the first
/// setting that cannot be adopted.
std::string WorldState::adopt_settings() {
  std::string problem;
  for (const auto& core : cores_) {
    if (!core->retired() && core->adopt_settings) {
      const std::string one = core->adopt_settings();
      problem = problem.empty() ? one : problem;
    }
  }
  return problem;
}

StepResult WorldState::perform_step(Lock& lock, const GateMerged& gate) {
  StepResult result;
  sequencer_.launch_held(gate.held_engines);  // what is held anywhere travels now
  launch_due();
  wait_for_reductions(result.times);

  std::vector<Part> parts =
      gather_parts(gate);  // who was seen by whom, and each engine's denominator
  joint_norm(lock, gate.norm_type, parts, result);  // the same bits on all ranks and world sizes
  trim();                                           // now: nothing of ours is under way on a device

  const bool empty =
      std::all_of(parts.begin(), parts.end(), [](const Part& p) { return p.unseen; });
  if (empty) {
    result.reason = StepReason::kEmpty;
  } else if (!std::isfinite(result.norm)) {
    result.reason =
        StepReason::kNonFinite;  // parameters, moments and step counts stay as they were
  } else {
    result.clip_factor = clip_factor(result.norm, gate.clip_norm);
    update_and_gather(gate, parts, result);
    result.reason = StepReason::kApplied;
    result.applied = true;
    ++updates_;
  }

  windows_ever_cleared_ = true;
  clear_windows(gate.step_engines);
  for (const Part& part : parts) {
    part.core->armed = false;
  }
  for (const auto& core : cores_) {
    core->window.passed_over = core->window.passes > 0;
  }
  result.updates = updates_;
  result.loss_scale = loss_scale_.value_or(1.0);
  move_loss_scale(result);  // windows that stay open follow
  return result;
}

// The host waits until the reductions are done on the CPU, and given to their stream on a device;
// there the step's stream waits for them.
void WorldState::wait_for_reductions(StepTimes& times) {
  const TraceSpan span(*trace_, "exposed reductions", Trace::Row::kUser);
  Stopwatch watch;
  await_event(queue_->record(), "reductions before the step");
  for (const auto& lane : lanes_) {
    lane->step = &lane->torch->current();
    lane->asked = lane->step->record();
    lane->step->wait(lane->stream->record());
    lane->reductions_done = lane->step->record();
  }
  times.exposed = watch.lap();
  const double busy = queue_->busy_seconds();
  times.reduction = busy - std::exchange(busy_at_last_step_, busy);
}

/// Staging that no pass has needed for some steps goes back to the system.
void WorldState::trim() {
  for (const auto& core : cores_) {
    if (core->channel) {
      core->channel->trim(kIdleSteps);
    }
  }
}

std::vector<WorldState::Part> WorldState::gather_parts(const GateMerged& gate) const {
  std::vector<Part> parts;
  std::size_t first_parameter = 0;
  std::size_t first_group = 0;
  for (const auto& core : cores_) {
    const auto index = static_cast<std::size_t>(core->index);
    const std::size_t begin = first_parameter;
    const std::size_t group_begin = first_group;
    first_parameter += core->parameter_count();
    first_group += core->groups;
    if (!gate.step_engines[index]) {
      continue;
    }
    for (std::size_t g = 0; !core->retired() && g < core->groups; ++g) {
      const Tunables& agreed = gate.tunables[group_begin + g];  // a rank that has left takes these
      core->shard->groups().adopt(g, agreed.lr, agreed.weight_decay);
    }
    Part part;
    part.core = core.get();
    part.tokens = gate.tokens[index];
    part.seen.assign(core->parameter_count(), false);
    for (std::size_t p = 0; p < part.seen.size(); ++p) {
      part.seen[p] = gate.seen_parameters[begin + p];
      part.unseen = part.unseen && !part.seen[p];
    }
    if (!part.unseen) {
      part.averaging =
          averaging(*core, gate, gate.step_multipliers.of_engine[index], "World::step");
      if (part.averaging.denominator == 0.0) {  // counted, and zero: there is nothing to learn from
        part.unseen = true;
        part.seen.assign(part.seen.size(), false);
      }
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

WorldState::Averaging WorldState::averaging(const EngineCore& core,
                                            const GateMerged& gate,
                                            double multiplier,
                                            const std::string& call) const {
  const auto index = static_cast<std::size_t>(core.index);
  const Window& window = core.window;
  Averaging averaging;
  averaging.multiplier = multiplier;
  switch (average_) {
    case Average::kRanks:
      averaging.denominator =
          static_cast<double>(window.pairs) / static_cast<double>(window.passes);
      break;
    case Average::kMicroBatches:
      averaging.denominator = static_cast<double>(window.pairs);
      break;
    case Average::kTokens:
      if (!gate.counted_engines[index]) {
        throw InvalidArgument(call +
                              ": gradients are averaged by tokens, but no rank counted any for "
                              "engine '" +
                              core.name + "' in this window; call count_tokens()");
      }
      averaging.denominator = static_cast<double>(gate.tokens[index]);
      break;
    case Average::kNone:
      averaging.denominator = 1.0;
      break;
  }
  averaging.loss_scale = loss_scale_.value_or(1.0);
  return averaging;
}

void WorldState::update_and_gather(const GateMerged& gate,
                                   std::vector<Part>& parts,
                                   StepResult& result) {
  Stopwatch watch;
  for (Part& part : parts) {
    if (part.unseen) {
      continue;  // not stepped, not decayed, not counted (I4)
    }
    EngineCore& core = *part.core;
    if (core.window.passed_over && !warned_passed_over_) {
      warned_passed_over_ = true;
      std::fprintf(
          stderr,
          "tandem: engine '%s' is stepped with gradients that were there when another engine was "
          "stepped; if they are not wanted, use World::only() in that pass or Engine::zero_grad() "
          "(this is said once)\n",
          core.name.c_str());
    }
    kernels::Stream& stream = *core.lane->step;
    core.shard->begin_update(stream, part.seen, part.averaging.scaled(result.clip_factor));
    for (std::size_t b = 0; b < core.bucket_count(); ++b) {
      const zero::BucketLayout& bucket = core.plan.buckets[b];
      const bool stepped = std::any_of(bucket.placements.begin(), bucket.placements.end(),
                                       [&](const zero::Placement& p) {
                                         return part.seen[static_cast<std::size_t>(p.parameter)];
                                       });
      if (!stepped) {
        continue;
      }
      const Trace::About about{.engine = core.serial, .bucket = static_cast<std::int32_t>(b)};
      {
        const TraceSpan span(*trace_, "update", Trace::Row::kUser, about);
        core.shard->update(stream, about.bucket);
      }
      // The queue gathers the peers' slices of this bucket while the next one is updated.
      const std::uint64_t gather = core.channel->post_gather({stream.record()});
      queue_->enqueue([shared = cores_[static_cast<std::size_t>(core.index)], b, gather, about,
                       trace = trace_, size = group_.size, until = deadline()] {
        const TraceSpan span(*trace, "gather", Trace::Row::kQueue, about);
        const zero::BucketLayout& layout = shared->plan.buckets[b];
        const std::size_t element = kernels::bytes_of(layout.dtype);
        shared->channel->gather(
            gather,
            [&](int rank) {
              const zero::Range slice = zero::slice_of({rank, size}, layout.numel);
              const auto base = static_cast<std::size_t>(layout.flat_offset);
              return comm::ByteRange{base + static_cast<std::size_t>(slice.begin) * element,
                                     base + static_cast<std::size_t>(slice.end) * element};
            },
            "parameters of bucket " + std::to_string(b), until);
      });
    }
  }
  result.times.update = watch.lap();
  const TraceSpan span(*trace_, "exposed gathers", Trace::Row::kUser);
  await_event(queue_->record(), "gathering the updated parameters");
  for (Part& part : parts) {  // buffers of frozen engines too: their BatchNorm runs all the same
    if (part.core->channel) {
      exchange_buffers(*part.core, gate.stepping_ranks);
      part.core->channel->wait_gathered_by_all("updated parameters", deadline());
      part.core->parameters->touch(part.seen);
    }
  }
  hand_parameters_to_torch();
  busy_at_last_step_ = queue_->busy_seconds();  // gathers are no reductions
  result.times.gather = watch.lap();
}

/// On a device the user's stream waits for the gathers, and the lane's for all of this step: the
/// next reductions write what it reads, and the next step, perhaps on another stream of the user's,
/// comes behind them. The host waits for neither.
void WorldState::hand_parameters_to_torch() {
  for (const auto& lane : lanes_) {
    lane->step->wait(lane->stream->record());
    kernels::Mark done = lane->step->record();
    lane->stream->wait(done);
    lane->watch(std::move(done), deadline(),
                "parameters after step " + std::to_string(updates_ + 1));
    lane->torch->before_torch();
  }
}

}  // namespace tandem::engine
