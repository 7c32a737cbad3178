// engine/touches.cpp: the collective calls of a world that are no step: each resolves the last
// pass, says its word and does what was agreed.
#include "engine/world_state.h"
#include <tandem/error.h>

#include <algorithm>
#include <cstdio>

namespace tandem::engine {

void WorldState::backward(const at::Tensor& loss, bool retain_graph) {
  check_usable();
  const std::int64_t passes_before = locked([&] { return passes_; });
  try {
    loss.backward({}, retain_graph);
  } catch (...) {
    const std::exception_ptr original = std::current_exception();
    Lock lock(mutex_);
    const bool opened_a_pass = passes_ != passes_before;
    if (opened_a_pass && !broken_) {  // else it threw before its first hook: nothing was posted
      try {
        abandon_own_pass();
        wait_until_resolved(lock);
        failure_ = nullptr;  // the original is the report
      } catch (const InvalidArgument&) {
        // Called from inside another pass, or another thread's pass is open: that one is left
        // alone.
      } catch (const std::exception& error) {
        break_world(error.what());
      }
    }
    std::rethrow_exception(original);
  }
  resolve_pass();
}

void WorldState::backward(const at::Tensor& loss,
                          const BackwardOptions& options,
                          const EngineCore* only) {
  if (!options.weight) {
    return backward(loss, options.retain_graph);
  }
  check_usable();
  if (average() != Average::kTokens) {
    throw InvalidArgument(
        "backward: a weight makes the step's mean one over tokens, but this world does not average "
        "by tokens; set WorldOptions::average to Average::kTokens");
  }
  const TokenCount& weight = *options.weight;
  const bool on_host = !weight.is_tensor() || weight.tensor().is_cpu();
  const std::int64_t count = !on_host             ? -1
                             : weight.is_tensor() ? weight.tensor().item<std::int64_t>()
                                                  : weight.number();
  if (on_host && count < 0) {
    throw InvalidArgument("backward: a weight of " + std::to_string(count) +
                          " tokens; a count is >= 0");
  }
  if (count == 0) {
    run_empty_pass();
  } else {  // in double: exact up to 2^53 tokens
    const at::Tensor wide = loss.to(at::kDouble);
    backward(on_host ? wide * count : wide * weight.tensor().to(at::kDouble), options.retain_graph);
  }
  count_tokens(only, weight);
}

/// A pass of this rank in which nothing arrives: zeros, whatever its loss would have given.
void WorldState::run_empty_pass() {
  if (hooks::PassTracker::inside_graph_task()) {
    throw InvalidArgument("backward: called from inside a backward pass");
  }
  resolve_pass();
  opened();
  closed();
  {
    const std::lock_guard lock(mutex_);
    for (const auto& core : cores_) {
      core->armed = false;
    }
  }
  resolve_pass();
}

void WorldState::resolve_pass() {
  guarded([&] {
    Lock lock(mutex_);
    resolve(lock);
  });
}

std::int64_t WorldState::window() {
  return guarded([&] {
    Lock lock(mutex_);
    abandon_own_pass();
    wait_until_resolved(
        lock);  // what the pass failed with is kept for the next call that throws it
    return window_passes_;
  });
}

void WorldState::set_average(Average average) {
  guarded([&] {
    Lock lock(mutex_);
    abandon_own_pass();
    wait_until_resolved(lock);
    for (const auto& core : cores_) {
      if (average != average_ && core->window.passes > 0) {
        throw InvalidArgument("World::set_average: the window of engine '" + core->name +
                              "' holds gradients already; call it behind a step or zero_grad");
      }
    }
    average_ = average;
  });
}

double WorldState::value(ValueOp op, double value, int root) {
  if (root < 0 || root >= group_.size) {
    throw InvalidArgument("World::broadcast: root " + std::to_string(root) + " is no rank of " +
                          std::to_string(group_.size));
  }
  return guarded([&] {
    Lock lock(mutex_);
    const TraceSpan span(*trace_, "joint value", Trace::Row::kUser);
    GateSay say;
    say.word = Word::kValues;
    say.value_op = op;
    say.value_root = root;
    say.value = value;
    const GateMerged gate = agree(lock, say);
    if (op == ValueOp::kBroadcast) {
      return *gate.values[static_cast<std::size_t>(root)];
    }
    double sum = 0.0;
    int count = 0;
    for (const std::optional<double>& one : gate.values) {  // in rank order
      if (one) {
        sum += *one;
        ++count;
      }
    }
    return op == ValueOp::kMean ? sum / count : sum;
  });
}

void WorldState::zero_grad(const EngineCore* only) {
  guarded([&] {
    Lock lock(mutex_);
    const TraceSpan span(*trace_, "zero_grad", Trace::Row::kUser);
    GateSay say;
    say.word = Word::kZeroGrad;
    say.zero_engines.assign(cores_.size(), only == nullptr);
    if (only != nullptr) {
      say.zero_engines[static_cast<std::size_t>(only->index)] = true;
    }
    const Bits engines = agree(lock, say).zero_engines;
    clear_windows(engines);
    drop_gradients(engines);
    windows_ever_cleared_ = true;
  });
}

void WorldState::clear_windows(const Bits& engines) {
  for (const auto& core : cores_) {
    if (engines[static_cast<std::size_t>(core->index)] && core->gradients != nullptr) {
      core->clear_window();
      sequencer_.clear_window(core->index);
    }
  }
  const bool all_empty = std::all_of(cores_.begin(), cores_.end(), [](const auto& core) {
    return core->retired() || core->window.passes == 0;
  });
  if (all_empty) {
    window_passes_ = 0;
  }
}

void WorldState::leave() {
  {
    const std::lock_guard lock(mutex_);
    if (left_ || closed_) {
      return;
    }
  }
  guarded([&] {
    Lock lock(mutex_);
    resolve(lock);
    for (const auto& core : cores_) {  // edits count; what cannot be put right hurts nobody now
      if (!core->retired()) {
        restore_moved(*core);
      }
    }
    if (const std::string problem = read_tokens(); !problem.empty()) {
      std::fprintf(stderr, "tandem: rank %d leaves with a wrong count, which is left out: %s\n",
                   group_.rank, problem.c_str());
    }
    GateSay say;
    say.word = Word::kLeave;
    agree(lock, say);
    left_ = true;
  });
}

void WorldState::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      return;
    }
    if (broken_) {
      throw WorldBroken("this world is broken and cannot be closed in order: " + *broken_);
    }
  }
  leave();
  try {
    // What a peer has not received yet goes with this rank's communicator.
    await_event(queue_->record(), "what was enqueued before close()");
    {
      const std::lock_guard lock(mutex_);
      for (const auto& lane : lanes_) {
        await_mark(*lane, lane->stream->record(), "the last work before close()");
      }
    }
    rendezvous_->close(deadline());
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    break_world(error.what());
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  trace_->stop();
}

}  // namespace tandem::engine
