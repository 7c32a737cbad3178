// hooks/pass_tracker.cpp: the tracker's face, and the hook on tracked outputs.
#include "hooks/pass_tracker.h"

#include "hooks/pass_state.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace tandem::hooks {
namespace {

// True inside autograd::grad(): it hands gradients to its caller and accumulates none in leaves, so
// it is no part of training and no pass. (backward(inputs) names leaves too, but captures nothing.)
bool only_captures() {
  const auto* execution = torch::autograd::get_current_graph_task_exec_info();
  return execution != nullptr &&
         std::any_of(execution->begin(), execution->end(),
                     [](const auto& node) { return node.second.captures_ != nullptr; });
}

// Sits on the node that made the output, among the hooks of tensors: those run wherever the
// gradient passes, also where it is what autograd::grad() was asked for and the node itself is not
// run. Not Tensor::register_hook: its list is shared with the user's own hooks on the same tensor,
// and LibTorch leaves the mix with Python's undefined.
class OutputHook : public torch::autograd::FunctionPreHook {
 public:
  OutputHook(std::weak_ptr<PassState> state, std::int32_t engine, std::size_t output)
      : state_(std::move(state)), engine_(engine), output_(output) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    // A node of several outputs runs the hooks of all of them, also if only a sibling was used.
    if (output_ >= grads.size() || !grads[output_].defined() || only_captures()) return grads;
    if (const std::shared_ptr<PassState> state = state_.lock()) {
      const bool on_cpu = grads[output_].device().is_cpu();
      const PassState::Entry entry =
          state->enter(on_cpu ? HookThread::kCallers : HookThread::kDevices);
      const PassState::Visit visit(*state, entry);
      if (entry.verdict == PassState::Verdict::kDeliver) entry.sink->reached(engine_);
    }
    return grads;
  }

 private:
  std::weak_ptr<PassState> state_;
  std::int32_t engine_;
  std::size_t output_;
};

}  // namespace

PassTracker::PassTracker(PassSink& sink) : state_(std::make_shared<PassState>(sink)) {}

// A hook that runs at this moment may keep the state alive a little longer, and is waited for while
// it calls the sink.
PassTracker::~PassTracker() { state_->leave_sink(); }

void PassTracker::track_output(std::int32_t engine, const at::Tensor& output) {
  if (!output.defined() || !output.requires_grad()) return;
  const auto& node = output.grad_fn();  // the pointer's type differs between LibTorch releases
  if (!node) return;
  node->add_tensor_pre_hook(std::make_unique<OutputHook>(state_, engine, output.output_nr()));
}

void PassTracker::reach(std::int32_t engine) {
  const PassState::Entry entry = state_->enter(HookThread::kCallers);
  const PassState::Visit visit(*state_, entry);
  if (entry.verdict == PassState::Verdict::kDeliver) {
    entry.sink->reached(engine);
  }
}

bool PassTracker::inside_graph_task() { return torch::autograd::get_current_graph_task_id() >= 0; }

bool PassTracker::pass_open() const { return state_->open(); }

bool PassTracker::opened_by_this_thread() const { return state_->opened_by_this_thread(); }

bool PassTracker::delivers_now() const { return state_->delivers_now(); }

std::size_t PassTracker::known_tasks() const { return state_->known_tasks(); }

void PassTracker::disarm() { state_->disarm(); }

}  // namespace tandem::hooks
