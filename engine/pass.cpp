// engine/pass.cpp: one backward pass, from the hooks' events through the sequencer to launches.
#include "engine/world_state.h"
#include <tandem/error.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace tandem::engine {

// --- what precedes a pass ---

void WorldState::track(EngineCore& core, const at::Tensor& output) {
  if (!output.requires_grad()) {
    return;
  }
  tracker_->track_output(core.serial, output);
  const std::lock_guard lock(mutex_);
  core.armed = true;
}

void WorldState::prologue(EngineCore& core) {
  if (hooks::PassTracker::inside_graph_task()) {
    tracker_->reach(core.serial);  // as a hook would
    return;
  }
  check_usable();
  const std::lock_guard lock(mutex_);
  core.armed = true;
}

void WorldState::epilogue() {
  if (!hooks::PassTracker::inside_graph_task()) {  // inside, the end of the pass runs it
    resolve_pass();
  }
}

void WorldState::push_hold(int change) {
  const std::lock_guard lock(mutex_);
  hold_depth_ += change;
}

void WorldState::push_only(const std::vector<const EngineCore*>& engines) {
  const std::lock_guard lock(mutex_);
  std::vector<std::int32_t> serials;
  for (const EngineCore* core : engines) {
    serials.push_back(core->serial);
  }
  only_.push_back(std::move(serials));
}

void WorldState::pop_only() {
  const std::lock_guard lock(mutex_);
  only_.pop_back();
}

// --- the hooks' events, on the user's thread ---

// The first hook of a pass. A touch: the previous close is resolved and its folds are done by all
// ranks, so that no more than one pass's buckets are in flight.
void WorldState::opened() {
  guarded([&] {
    Lock lock(mutex_);
    pass_began_ = trace_->on() ? Trace::now() : -1;
    profiled_pass_ = kernels::begin_profiler_range("pass");
    wait_until_resolved(lock);
    report_failure(lock);
    if (const std::string problem = settle_parameters(); !problem.empty()) {
      refuse_opening(lock, problem);
    }
    const std::vector<std::shared_ptr<EngineCore>> cores = cores_;
    lock.unlock();
    for (const auto& core : cores) {
      const TraceSpan span(*trace_, "wait for folds of the last pass", Trace::Row::kUser,
                           {.engine = core->serial});
      if (core->channel) {
        core->channel->wait_folded_by_all("reductions of the last pass", deadline());
      }
    }
    lock.lock();

    Opening opening;
    opening.hold = hold_depth_ > 0;
    for (const auto& core : cores_) {
      const bool allowed = only_.empty() || std::find(only_.back().begin(), only_.back().end(),
                                                      core->serial) != only_.back().end();
      opening.allowed.push_back(allowed);
      opening.armed.push_back(core->armed);
      Bits& frozen = opening.frozen.emplace_back();
      if (!core->retired()) {
        for (const at::Tensor& tensor : core->parameters->tensors()) {
          frozen.push_back(!tensor.requires_grad());
        }
      }
      core->reached = false;
    }
    ++passes_;
    abandoned_ = false;
    GateSay say;
    say.only_hash = hash_of(opening.allowed);
    say.multipliers = multipliers();
    multiply_windows(say.multipliers);  // before this pass adds to them
    for (const auto& core : cores_) {
      say.multiplications.push_back(core->window.multipliers.calls());
      core->window.multipliers.said();
    }
    begin_scaling(say);
    sequencer_.open(std::move(opening), say);
    complete_say(say);
    said_ = describe(say);
    post_gate(say);
  });
}

void WorldState::reached(std::int32_t serial) {
  const std::lock_guard lock(mutex_);
  EngineCore* core = live_core(serial);
  if (core != nullptr && !core->reached) {
    core->reached = true;
    ++core->prologues;
  }
}

// A gradient: copied once, into its bucket; then everything that has become complete is launched.
void WorldState::arrived(std::int32_t serial, std::int32_t parameter, at::Tensor gradient) {
  reached(serial);
  const std::lock_guard lock(mutex_);
  EngineCore* core = live_core(serial);
  if (core == nullptr || broken_ || !tracker_->delivers_now()) {
    return;
  }
  const auto name = [&] {
    return "engine '" + core->name + "', parameter '" +
           core->infos[static_cast<std::size_t>(parameter)].name + "': ";
  };
  const Arrival place = sequencer_.classify(core->index, parameter);
  if (place == Arrival::kDropped) {
    return;
  }
  try {
    if (place == Arrival::kLate) {
      core->gradients->put_late(parameter, gradient);
    } else {
      core->gradients->put_main(parameter, gradient, sequencer_.holds(core->index));
    }
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(name() + error.what());
  } catch (const kernels::DeviceError& error) {
    throw_public(error, name());
  }
  trace_->instant(
      "arrival", Trace::Row::kUser,
      {.engine = serial, .parameter = parameter, .pass = passes_, .late = place == Arrival::kLate});
  core->window.seen[static_cast<std::size_t>(parameter)] = true;
  sequencer_.arrived(core->index, parameter, place);
  if (sequencer_.gate_known()) {
    launch_due();
  } else {
    advance();
  }
}

void WorldState::closed() {
  const std::lock_guard lock(mutex_);
  for (const auto& core : cores_) {
    if (core->reached) {
      core->reached = false;
      ++core->epilogues;
    }
  }
  if (!broken_ && sequencer_.in_pass() && !sequencer_.closed()) {
    trace_pass("backward");
    post_close(/*failed=*/false);
    advance();
    progress_wanted_.notify_all();
  }
}

// From the destructor of what the graph task owned; any thread. The progress thread posts the
// close.
void WorldState::abandoned() noexcept {
  abandoned_ = true;
  progress_wanted_.notify_all();
}

// --- rounds of the pass ---

void WorldState::trace_pass(const char* name) {
  kernels::end_profiler_range(profiled_pass_);
  trace_->span(name, Trace::Row::kUser, std::exchange(pass_began_, -1), {.pass = passes_});
}

void WorldState::post_gate(const GateSay& say) {
  trace_->instant("gate posted", Trace::Row::kAgreement, {.pass = passes_});
  gate_round_ = control_->post(encode(say, sequencer_.shape(), group_.rank));
  progress_wanted_.notify_all();
}

void WorldState::post_close(bool failed) {
  const CloseSay say = sequencer_.close(failed);
  for (const auto& core : cores_) {
    if (say.took_engines[static_cast<std::size_t>(core->index)]) {
      core->armed = false;
    }
  }
  trace_->instant("close posted", Trace::Row::kAgreement, {.pass = passes_});
  close_round_ = control_->post(encode(say, sequencer_.shape(), group_.rank));
}

bool WorldState::advance() {
  try {
    return take_rounds();
  } catch (const std::exception& error) {  // what the other ranks go on to do is missing here
    break_world(error.what());
    throw;
  }
}

// Takes what has been merged and launches what has become due. Never blocks. True if something
// happened.
bool WorldState::take_rounds() {
  if (!sequencer_.in_pass()) {
    return false;
  }
  bool moved = false;
  if (abandoned_ && !sequencer_.closed()) {
    abandoned_ = false;
    tracker_->disarm();
    trace_pass("backward, failed");
    post_close(/*failed=*/true);
    moved = true;
  }
  if (!sequencer_.gate_known()) {
    if (const std::optional<comm::Message> message = control_->test(gate_round_)) {
      trace_->instant("gate merged", Trace::Row::kAgreement, {.pass = passes_});
      const GateMerged gate = decode_gate(*message, sequencer_.shape());
      gate_error_ = gate_error(gate, group_.size);
      sequencer_.gate_merged(gate, gate_error_.has_value());
      moved = true;
    }
  }
  launch_due();
  if (sequencer_.gate_known() && sequencer_.closed()) {
    if (const std::optional<comm::Message> message = control_->test(close_round_)) {
      finish_pass(decode_close(*message, sequencer_.shape()));
      moved = true;
    }
  }
  return moved;
}

void WorldState::finish_pass(const CloseMerged& close) {
  trace_->instant("close merged", Trace::Row::kAgreement, {.pass = passes_});
  const Resolution resolution = sequencer_.close_merged(close);
  launch_due();
  const auto at = [](const auto& core) { return static_cast<std::size_t>(core->index); };
  abandoned_ = false;
  if (std::exchange(scaling_began_, false) && gate_error_) {
    loss_scale_.reset();  // the other ranks did not begin
  }
  if (resolution.failed) {
    std::string passed_over;
    for (const auto& core : cores_) {
      if (core->window.passed_over) {
        passed_over += " '" + core->name + "'";
      }
    }
    if (!passed_over.empty()) {
      passed_over = "; with them went gradients from before the last step, of" + passed_over;
    }
    clear_windows(Bits(cores_.size(), true));
    window_passes_ = 0;
    const bool here = resolution.failed_ranks[static_cast<std::size_t>(group_.rank)];
    if (!here && !gate_error_) {
      std::string ranks;
      for (std::size_t r = 0; r < resolution.failed_ranks.size(); ++r) {
        if (resolution.failed_ranks[r]) {
          ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
        }
      }
      failure_ = std::make_exception_ptr(
          BackwardFailed("backward pass " + std::to_string(passes_) + " failed on rank " + ranks +
                         "; the windows of all engines were discarded, parameters and optimizer "
                         "states are unchanged" +
                         passed_over + ": repeat the window from its first pass"));
    }
  } else {
    for (const Launch& late : resolution.late_to_main) {
      cores_[static_cast<std::size_t>(late.engine)]->gradients->add_late_to_main(late.bucket);
    }
    for (const auto& core : cores_) {
      if (resolution.took_engines[at(core)] && !core->retired()) {
        ++core->window.passes;
        core->window.pairs += resolution.ranks_in_pass;
      }
    }
    ++window_passes_;  // also one that delivered nothing: a retry counts passes
    warn_of_an_endless_window();
  }
  drop_retired();
  progress_wanted_.notify_all();
}

// --- launches ---

void WorldState::launch_due() {
  const std::vector<Launch> due = sequencer_.take_launches();
  try {
    for (const Launch& one : due) {
      launch(one);
    }
  } catch (const kernels::DeviceError& error) {
    break_world(error.what());
    throw_public(error);
  } catch (const std::exception& error) {  // the other ranks make this launch
    break_world(error.what());
    throw;
  }
}

// Publishes this rank's contribution and enqueues the fold of its own slice of everybody's.
void WorldState::launch(const Launch& due) {
  const std::shared_ptr<EngineCore>& core = cores_[static_cast<std::size_t>(due.engine)];
  const auto bucket = static_cast<std::size_t>(due.bucket);
  const kernels::Dtype wire = due.fp32 ? kernels::Dtype::kFloat32 : core->plan.buckets[bucket].wire;
  const zero::Contribution mine = due.late ? core->gradients->take_late(due.bucket)
                                           : core->gradients->take_main(due.bucket, wire);
  const std::int64_t numel = core->plan.buckets[bucket].numel;
  const comm::PostId post = core->channel->post(mine.staging, mine.wire, [&](int rank) {
    const zero::Range slice = zero::slice_of({rank, group_.size}, numel);
    return comm::ElementRange{slice.begin, slice.end};
  });
  const kernels::Accumulator state =
      core->window.fresh[bucket] ? kernels::Accumulator::kFresh : kernels::Accumulator::kContinue;
  core->window.fresh[bucket] = false;
  ++launches_;
  const Trace::About about{.engine = core->serial,
                           .bucket = due.bucket,
                           .bytes = static_cast<std::int64_t>(mine.staging.bytes),
                           .pass = passes_,
                           .post = static_cast<std::int64_t>(post),
                           .late = due.late};
  trace_->instant("launch", Trace::Row::kUser, about);
  queue_->enqueue([core, post, state, about, trace = trace_, timeout = options_.timeout] {
    Lane& lane = *core->lane;
    const TraceSpan span(*trace, lane.asynchronous ? "give fold" : "fold", Trace::Row::kQueue,
                         lane.asynchronous ? Trace::About{.engine = about.engine} : about);
    kernels::Mark begin = lane.stream->record();
    const zero::Range slice = core->shard->slice(about.bucket);
    core->channel->fold(post, slice.begin, slice.numel(), core->shard->accumulator(about.bucket),
                        state, "bucket " + std::to_string(about.bucket),
                        comm::Deadline::after(timeout));
    lane.reduced(std::move(begin), about, comm::Deadline::after(timeout));
  });
}

// --- helpers ---

EngineCore* WorldState::live_core(std::int32_t serial) const {
  const auto found = index_of_.find(serial);
  if (found == index_of_.end()) {
    return nullptr;
  }
  EngineCore* core = cores_[static_cast<std::size_t>(found->second)].get();
  return core->retired() ? nullptr : core;
}

}  // namespace tandem::engine
