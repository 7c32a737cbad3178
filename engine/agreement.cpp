// engine/agreement.cpp: gates, waits and errors: how this rank's calls meet the other ranks'.
#include "comm/mark_wait.h"
#include "engine/world_state.h"
#include <tandem/error.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

namespace tandem::engine {

void WorldState::check_usable() const {
  const std::lock_guard lock(mutex_);
  if (broken_) {
    throw WorldBroken("this world is broken and takes no more calls: " + *broken_);
  }
  if (closed_) {
    throw WorldBroken("this world was closed and takes no more calls");
  }
  if (left_) {
    throw WorldBroken("this rank has left its world and takes no more calls but close()");
  }
}

void throw_public(const kernels::DeviceError& error, const std::string& where) {
  if (dynamic_cast<const kernels::OutOfDeviceMemory*>(&error) != nullptr) {
    throw OutOfMemory(where + error.what());
  }
  throw DeviceError(where + error.what());
}

void WorldState::break_world(const std::string& text) noexcept {
  try {
    if (!broken_) {
      broken_ = text;
      control_->abort(text);
    }
  } catch (
      ...) {  // NOLINT(bugprone-empty-catch): the error that broke the world is on its way already
  }
}

bool WorldState::finished() const {
  const std::lock_guard lock(mutex_);
  return closed_ || broken_.has_value();
}

// --- waits ---

void WorldState::time_out(const std::string& what, const std::vector<int>& missing) {
  std::ostringstream text;
  text << what << ": not finished after " << std::chrono::duration<double>(options_.timeout).count()
       << " s on rank " << group_.rank;
  if (!missing.empty()) {
    text << ", missing ranks";
    for (std::size_t i = 0; i < missing.size(); ++i) {
      text << (i == 0 ? " " : ", ") << missing[i];
    }
  }
  text << "; look there for the cause, or raise WorldOptions::timeout";
  throw Timeout(text.str());
}

// Sleeps without the lock until `take` has what it waits for. The progress thread keeps out
// meanwhile.
template <class Take>
auto WorldState::await(Lock& lock, comm::RoundId round, const std::string& what, Take&& take) {
  const TraceSpan span(*trace_, "wait for ranks", Trace::Row::kUser);
  const comm::Deadline until = deadline();
  ++touching_;
  struct Leave {
    int& touching;
    ~Leave() { --touching; }
  } leave{touching_};
  for (;;) {
    const std::uint32_t seen = control_->change();
    if (auto merged = take(round)) {
      return *std::move(merged);
    }
    if (until.passed()) {
      time_out(what, control_->missing(round));
    }
    lock.unlock();
    control_->wait_for_change(seen, until.at);
    lock.lock();
  }
}

comm::Message WorldState::await_message(Lock& lock, comm::RoundId round, const std::string& what) {
  return await(lock, round, what, [&](comm::RoundId r) { return control_->test(r); });
}

std::vector<std::string> WorldState::gather_texts(Lock& lock,
                                                  const std::string& text,
                                                  const std::string& what) {
  return await(lock, control_->post_text(text), what,
               [&](comm::RoundId round) { return control_->test_texts(round); });
}

void WorldState::await_event(const kernels::Event& event, const std::string& what) {
  const TraceSpan span(*trace_, "wait for the queue", Trace::Row::kUser);
  // The jobs have deadlines of their own; this one only ends a wait for a queue that is stuck.
  const comm::Deadline until = comm::Deadline::after(2 * options_.timeout);
  if (!event.wait_until(until.at)) {
    time_out(what, {});
  }
}

// For the device's work, which knows no deadline: it is ended here if it does not end by itself.
// Under the lock.
void WorldState::await_mark(Lane& lane, const kernels::Mark& mark, const std::string& what) {
  if (mark.state() == nullptr) {
    return;
  }
  const TraceSpan span(*trace_, "wait for the device", Trace::Row::kUser);
  try {
    comm::await_mark(
        mark, [&] { lane.plane->check(); }, {lane.where.str(), what, group_}, deadline());
  } catch (const std::exception& error) {
    break_world(error.what());  // first: once aborted, the plane says only that it was
    lane.plane->abort();
    throw;
  }
}

// Before LibTorch reads what lies on a device: it would wait without a deadline.
void WorldState::await_devices(const std::string& what) {
  for (const auto& lane : lanes_) {
    await_mark(*lane, lane->stream->record(), what);
    await_mark(*lane, lane->torch->current().record(), what);
  }
}

// Waits for the close of the last pass. Inside a graph task: at the opening of the next one.
void WorldState::wait_until_resolved(Lock& lock) {
  const comm::Deadline until = deadline();
  ++touching_;
  struct Leave {
    WorldState& state;
    ~Leave() {
      --state.touching_;
      state.progress_wanted_.notify_all();
    }
  } leave{*this};
  while (sequencer_.in_pass()) {
    if (broken_) {
      throw WorldBroken(*broken_);
    }
    const std::uint32_t seen = control_->change();
    if (advance()) {
      continue;
    }
    if (until.passed()) {
      const bool gate = !sequencer_.gate_known();
      time_out(
          std::string(gate ? "gate" : "close") + " of backward pass " + std::to_string(passes_),
          control_->missing(gate ? gate_round_ : close_round_));
    }
    lock.unlock();
    control_->wait_for_change(seen, until.at);
    lock.lock();
  }
}

// What the last pass failed with, once: an error of its gate is explained by all ranks together.
void WorldState::report_failure(Lock& lock) {
  if (!gate_error_ && !failure_) {
    return;
  }
  // What was counted and multiplied since the failed pass belongs to its window: a retry says it
  // again.
  for (const auto& core : cores_) {
    core->window.drop_arithmetic();
  }
  if (gate_error_) {
    const std::string error = *std::exchange(gate_error_, std::nullopt);
    failure_ = nullptr;
    explain(lock, error, /*windows_discarded=*/true);
  }
  std::rethrow_exception(std::exchange(failure_, nullptr));
}

// A call of the pass's own thread outside every graph task: what opened the pass is gone without an
// end.
void WorldState::abandon_own_pass() {
  if (hooks::PassTracker::inside_graph_task()) {
    throw InvalidArgument(
        "a collective call of a world was made from inside a backward pass; make it before or "
        "after backward()");
  }
  if (!sequencer_.in_pass() || sequencer_.closed() || abandoned_) {
    return;
  }
  if (!tracker_->opened_by_this_thread()) {
    throw InvalidArgument(
        "a collective call of a world was made while another thread is in a backward pass of it; "
        "one thread at a time");
  }
  abandoned_ = true;
  tracker_->disarm();
}

// The beginning of every touch: the last pass is resolved, and what it failed with is said.
void WorldState::resolve(Lock& lock) {
  abandon_own_pass();
  wait_until_resolved(lock);
  report_failure(lock);
}

// --- gates ---

void WorldState::complete_say(GateSay& say) const {
  say.world_hash = world_hash();
  say.held_engines = sequencer_.held_engines();
  if (say.word != Word::kStep && say.word != Word::kLeave && say.word != Word::kGradient) {
    return;
  }
  if (say.word != Word::kLeave) {
    say.multipliers = multipliers();
  }
  say.seen_parameters.clear();
  say.tunables.clear();
  say.tokens.clear();
  say.counted_engines.assign(cores_.size(), false);
  for (const auto& core : cores_) {
    Bits seen = core->window.seen;
    seen.resize(core->parameter_count());
    say.seen_parameters.insert(say.seen_parameters.end(), seen.begin(), seen.end());
    const std::vector<Tunables> tunables = core->tunables();
    say.tunables.insert(say.tunables.end(), tunables.begin(), tunables.end());
    say.tokens.push_back(core->window.tokens);
    say.counted_engines[static_cast<std::size_t>(core->index)] = core->window.counted;
  }
}

/// The others run a backward pass: this rank takes part with nothing and closes at once.
void WorldState::join_pass(Lock& lock,
                           const GateMerged& gate,
                           const std::optional<std::string>& error) {
  ++passes_;
  if (!error) {
    multiply_windows(gate.backward_multipliers.of_engine);
    for (const auto& core : cores_) {
      const auto index = static_cast<std::size_t>(core->index);
      core->window.multipliers.joined(gate.backward_multipliers.of_engine[index],
                                      gate.multiplications[index]);
    }
    if (gate.loss_scale != 0.0) {
      set_loss_scale(gate.loss_scale);
    }
  }
  sequencer_.join(gate);
  gate_error_ = error;
  if (error) {
    sequencer_.gate_merged(gate, true);
  }
  post_close(false);
  wait_until_resolved(lock);
}

// Says `words` until all ranks are at a word that can proceed; takes its part in what the others do
// before.
GateMerged WorldState::agree(Lock& lock,
                             const GateSay& words,
                             const std::vector<std::string>& said) {
  resolve(lock);
  // What another rank could not go on with is not for a rank to hear that only waits for the end.
  const auto unless_leaving = [&](const auto& body) {
    try {
      body();
    } catch (const InvalidArgument&) {
      if (words.word != Word::kLeave) {
        throw;
      }
    }
  };
  for (;;) {
    GateSay say = words;
    complete_say(say);
    said_ = said.empty() ? describe(say) : said;
    const comm::RoundId round = control_->post(encode(say, sequencer_.shape(), group_.rank));
    const GateMerged gate = decode_gate(
        await_message(lock, round, std::string("the other ranks at ") + name_of(say.word)),
        sequencer_.shape());
    const std::optional<std::string> error = gate_error(gate, group_.size);
    if (gate.said(Word::kBackward)) {
      join_pass(lock, gate, error);
      unless_leaving([&] { report_failure(lock); });
      continue;
    }
    if (error) {
      unless_leaving([&] { explain(lock, *error, /*windows_discarded=*/false); });
      continue;
    }
    if (gate.said(Word::kRegister)) {
      return gate;
    }
    if (gate.said(Word::kZeroGrad)) {
      if (say.word == Word::kZeroGrad) {
        return gate;
      }
      clear_windows(gate.zero_engines);
    } else if (gate.said(Word::kValues)) {
      if (say.word == Word::kValues) {
        return gate;
      }
    } else if (gate.said(Word::kGradient)) {
      if (say.word == Word::kGradient) {
        return gate;
      }
      try {
        gather_gradient(lock, gate);      // this rank's slices
      } catch (const InvalidArgument&) {  // for those who asked
      }
    } else if (gate.said(Word::kStep)) {
      if (say.word == Word::kStep) {
        return gate;
      }
      unless_leaving([&] { perform_step(lock, gate); });  // it has left, and still owns its shards
    } else {
      return gate;  // all leave
    }
  }
}

}  // namespace tandem::engine
