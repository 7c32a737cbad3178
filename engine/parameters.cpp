// engine/parameters.cpp: what users did to parameters since the last look, put right or refused.
//
// Looked at when a pass opens and when a step begins, before this rank says its gate. What can be
// put right is, on the spot: nobody else need know. What cannot is said in the gate, so that all
// ranks throw the same error and none waits for this one.
//
// P1 Values that a user gave to a parameter are what training goes on from; no version is bumped
//    for them, since a graph made with them is as good as before they were moved.
// P2 No gradient is lost silently: one that went past our hook, or was set by hand, is refused.
#include "engine/world_state.h"
#include <tandem/error.h>

#include <cstdio>

namespace tandem::engine {

namespace {

/// Passes after which a program that never steps has probably another optimizer in mind.
constexpr std::int64_t kEndlessWindow = 1000;

std::string parameter_of(const EngineCore& core, std::int32_t parameter) {
  return "parameter '" + core.infos[static_cast<std::size_t>(parameter)].name + "' of engine '" +
         core.name + "'";
}

}  // namespace

/// Moved parameters (torch::load, to(), set_data) go back to where the update writes, with their
/// values. Returns what cannot be put right, or nothing.
std::string WorldState::restore_moved(EngineCore& core) {
  const std::vector<at::Tensor>& tensors = core.parameters->tensors();
  for (std::size_t p = 0; p < tensors.size(); ++p) {
    if (!tensors[p].is_leaf()) {
      return parameter_of(core, static_cast<std::int32_t>(p)) +
             " is the result of an operation now, because it was edited in place with gradients "
             "on; call detach_() on it, and edit parameters under torch::NoGradGuard";
    }
  }
  if (const std::int32_t moved = core.parameters->first_moved();
      moved >= 0 && core.options.share_parameters_on_node) {
    return parameter_of(core, moved) +
           " was given other memory (torch::load, set_data), but the engine was made with "
           "share_parameters_on_node: another rank may be reading its place. Copy values in place, "
           "under torch::NoGradGuard, on one rank of each node, between two joint calls "
           "(World::sum)";
  }
  try {
    core.parameters->restore_moved(core.name, core.infos);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

std::string WorldState::settle(EngineCore& core) {
  if (std::string problem = restore_moved(core); !problem.empty()) {
    return problem;
  }
  const std::vector<std::int32_t> missed = core.hooks->reattach();
  if (!missed.empty()) {
    return parameter_of(core, missed.front()) +
           " was given another post-accumulate-grad hook after the engine was made, and before "
           "Tandem noticed, a backward pass left its gradient in .grad, uncounted. Tandem's hook "
           "is back, behind the other one, and both run from now on; call modules through the "
           "engine's forward or track(), or set such hooks before wrapping";
  }
  try {
    core.check_buffers();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

// All engines are settled, whatever is wrong with one of them; the first problem is returned.
std::string WorldState::settle_parameters() {
  std::string first;
  for (const auto& core : cores_) {
    if (core->retired()) {
      continue;
    }
    std::string problem = settle(*core);
    if (first.empty()) {
      first = std::move(problem);
    }
  }
  return first;
}

// At a step only: what is in .grad before a backward pass is added to what arrives, by autograd.
std::string WorldState::gradient_set_by_hand(const Bits& engines) {
  for (const auto& core : cores_) {
    if (core->retired() || !engines[static_cast<std::size_t>(core->index)]) {
      continue;
    }
    if (!core->hooks->any_gradient()) {
      continue;
    }
    await_devices("a gradient set by hand");
    const std::int32_t parameter = core->hooks->first_with_gradient();
    if (parameter >= 0) {
      return parameter_of(*core, parameter) +
             " has a .grad that no backward pass made, and that a step would ignore: gradients of "
             "wrapped parameters live in the engine, and a torch::optim optimizer over them finds "
             "none. Give a gradient g by (p * g).sum().backward()";
    }
  }
  return {};
}

void WorldState::drop_gradients(const Bits& engines) {
  for (const auto& core : cores_) {
    if (!core->retired() && engines[static_cast<std::size_t>(core->index)]) {
      core->hooks->drop_gradients();
    }
  }
}

// This rank's pass is one that fails as it opens: the others, whatever they are at, meet its gate
// and its close, and hear with it what was wrong.
void WorldState::refuse_opening(Lock& lock, const std::string& problem) {
  ++passes_;
  abandoned_ = false;
  GateSay say;
  sequencer_.open({}, say);
  say.refused = true;
  complete_say(say);
  said_ = refusal(problem);
  post_gate(say);
  post_close(/*failed=*/true);
  wait_until_resolved(lock);
  report_failure(lock);
  throw InvalidArgument(problem);  // not reached: a gate with a refusal is an error
}

void WorldState::warn_of_an_endless_window() {
  if (window_passes_ == kEndlessWindow && !windows_ever_cleared_) {
    std::fprintf(stderr,
                 "tandem: %lld backward passes and no World::step() yet. Gradients of wrapped "
                 "parameters live in their engines: a torch::optim optimizer over them finds none "
                 "and does nothing; call World::step() (this is said once)\n",
                 static_cast<long long>(kEndlessWindow));
  }
}

}  // namespace tandem::engine
