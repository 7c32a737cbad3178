// hooks/leaf_hooks.cpp: the post-accumulate hook of one leaf, and the set of them over one engine.
//
// LibTorch has one slot a tensor and hands it to whoever writes last. So ours owns the occupant it
// found and runs it first, and Link says from outside whether our hook object still lives and still
// counts.
#include "hooks/pass_state.h"
#include "hooks/pass_tracker.h"
#include <tandem/error.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

namespace tandem::hooks {
namespace {

namespace autograd_slot = torch::autograd::impl;
using Occupant = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

// Shared by a hook object and the LeafHooks that made it; either may die first.
struct Link {
  std::weak_ptr<PassState> state;
  std::int32_t engine = 0;
  std::int32_t parameter = 0;
  std::shared_ptr<const std::string> owner;
  std::atomic<bool> active{true};  // false: the hook only passes on to its previous occupant
  // The hook object while it lives. Null after that, or a stranger's hook at the same address would
  // be taken for ours.
  std::atomic<const torch::autograd::PostAccumulateGradHook*> hook{nullptr};
};

class LeafHook : public torch::autograd::PostAccumulateGradHook {
 public:
  LeafHook(std::shared_ptr<Link> link, Occupant previous)
      : link_(std::move(link)), previous_(std::move(previous)) {
    link_->hook = this;
  }
  ~LeafHook() override { link_->hook = nullptr; }
  LeafHook(const LeafHook&) = delete;
  LeafHook& operator=(const LeafHook&) = delete;
  LeafHook(LeafHook&&) = delete;
  LeafHook& operator=(LeafHook&&) = delete;

  void operator()(const at::Tensor& leaf) override {
    // What is called below may take this very hook off: nothing of `this` is used after a call.
    const std::shared_ptr<Link> link = link_;
    if (previous_) run_previous(*previous_, *link, leaf);
    deliver(*link, leaf);
  }

  [[nodiscard]] bool active() const { return link_->active; }
  [[nodiscard]] const Link& link() const { return *link_; }
  [[nodiscard]] const torch::autograd::PostAccumulateGradHook* previous() const {
    return previous_.get();
  }
  [[nodiscard]] Occupant take_previous() { return std::move(previous_); }

 private:
  static void run_previous(PostAccumulateGradHook& previous,
                           const Link& link,
                           const at::Tensor& leaf) {
    try {
      previous(leaf);
    } catch (...) {
      if (link.active && !link.state.expired()) leaf.mutable_grad().reset();
      throw;
    }
  }

  static void deliver(const Link& link, const at::Tensor& leaf) {
    if (!link.active) return;
    const std::shared_ptr<PassState> state = link.state.lock();
    if (!state) return;
    at::Tensor& slot = leaf.mutable_grad();
    if (!slot.defined()) return;  // the previous occupant took it
    // Out of the leaf before anything can throw: a retry would add to what is left there.
    at::Tensor gradient = std::exchange(slot, at::Tensor());
    const PassState::Entry entry =
        state->enter(leaf.device().is_cpu() ? HookThread::kCallers : HookThread::kDevices);
    const PassState::Visit visit(*state, entry);
    switch (entry.verdict) {
      case PassState::Verdict::kDeliver:
        // With create_graph the gradient is part of a graph that reaches back to the leaf.
        if (gradient.requires_grad()) gradient = gradient.detach();
        entry.sink->arrived(link.engine, link.parameter, std::move(gradient));
        break;
      case PassState::Verdict::kDrop:
        break;
      case PassState::Verdict::kLeave:
        leaf.mutable_grad() = std::move(gradient);
        break;
    }
  }

  std::shared_ptr<Link> link_;
  Occupant previous_;
};

bool holds_slot(const at::Tensor& leaf, const Link& link) {
  if (autograd_slot::get_autograd_meta(leaf) == nullptr) return false;
  const Occupant& occupant = autograd_slot::post_acc_grad_hooks(leaf);
  return occupant != nullptr && occupant.get() == link.hook;
}

}  // namespace

struct LeafHooks::Impl {
  struct Place {
    at::Tensor leaf;
    std::shared_ptr<Link> link;
  };

  std::weak_ptr<PassState> state;
  std::int32_t engine = 0;
  std::shared_ptr<const std::string> owner;
  std::vector<Place> places;

  void install(std::size_t index) {
    Place& place = places[index];
    auto link = std::make_shared<Link>();
    link->state = state;
    link->engine = engine;
    link->parameter = static_cast<std::int32_t>(index);
    link->owner = owner;
    autograd_slot::materialize_autograd_meta(place.leaf);
    Occupant& slot = autograd_slot::post_acc_grad_hooks(place.leaf);
    slot = std::make_unique<LeafHook>(link, std::move(slot));
    place.link = std::move(link);
  }

  static void remove(Place& place) {
    if (!place.link) return;
    place.link->active = false;  // it may live on in somebody else's chain
    if (!holds_slot(place.leaf, *place.link)) return;
    Occupant& slot = autograd_slot::post_acc_grad_hooks(place.leaf);
    Occupant hook = std::move(slot);
    // Hooks of ours that were taken off while others lay above them leave the chain with it.
    while (auto* ours = dynamic_cast<LeafHook*>(hook.get())) {
      if (ours->active()) break;
      hook = ours->take_previous();
    }
    slot = std::move(hook);
  }
};

LeafHooks::LeafHooks(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

// Backwards: a tensor that is named twice has two of our hooks, the later above the earlier.
LeafHooks::~LeafHooks() {
  for (std::size_t i = impl_->places.size(); i-- > 0;) Impl::remove(impl_->places[i]);
}

std::int32_t LeafHooks::first_displaced() const {
  for (std::size_t i = 0; i < impl_->places.size(); ++i) {
    if (!holds_slot(impl_->places[i].leaf, *impl_->places[i].link)) {
      return static_cast<std::int32_t>(i);
    }
  }
  return -1;
}

std::vector<std::int32_t> LeafHooks::reattach() {
  std::vector<std::int32_t> missed;
  for (std::size_t i = 0; i < impl_->places.size(); ++i) {
    Impl::Place& place = impl_->places[i];
    if (holds_slot(place.leaf, *place.link)) continue;
    place.link->active = false;  // the new occupant may have chained our old hook
    impl_->install(i);
    at::Tensor& gradient = place.leaf.mutable_grad();
    if (gradient.defined()) {
      gradient.reset();
      missed.push_back(static_cast<std::int32_t>(i));
    }
  }
  return missed;
}

bool LeafHooks::any_gradient() const {
  return std::any_of(impl_->places.begin(), impl_->places.end(),
                     [](const Impl::Place& place) { return place.leaf.mutable_grad().defined(); });
}

std::int32_t LeafHooks::first_with_gradient() const {
  for (std::size_t i = 0; i < impl_->places.size(); ++i) {
    const at::Tensor& gradient = impl_->places[i].leaf.mutable_grad();
    // Zeros are what a zero_grad that keeps tensors makes of them.
    if (gradient.defined() &&
        (gradient.is_sparse() || gradient.count_nonzero().item<std::int64_t>() != 0)) {
      return static_cast<std::int32_t>(i);
    }
  }
  return -1;
}

void LeafHooks::drop_gradients() {
  for (const Impl::Place& place : impl_->places) place.leaf.mutable_grad().reset();
}

std::optional<std::string> PassTracker::taken_by(const at::Tensor& tensor) const {
  if (!tensor.defined() || autograd_slot::get_autograd_meta(tensor) == nullptr) return std::nullopt;
  const torch::autograd::PostAccumulateGradHook* hook =
      autograd_slot::post_acc_grad_hooks(tensor).get();
  while (const auto* one = dynamic_cast<const LeafHook*>(hook)) {
    const std::shared_ptr<PassState> state = one->link().state.lock();
    if (one->active() && state && state != state_) return *one->link().owner;
    hook = one->previous();
  }
  return std::nullopt;
}

std::unique_ptr<LeafHooks> PassTracker::attach_leaves(std::int32_t engine,
                                                      const std::vector<at::Tensor>& leaves,
                                                      const std::string& owner) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined() || !leaves[i].is_leaf()) {
      throw InvalidArgument(
          "parameter " + std::to_string(i) + " of engine " + std::to_string(engine) +
          (leaves[i].defined() ? " is the result of a computation" : " is an undefined tensor") +
          "; only leaf tensors have gradients of their own to reduce");
    }
  }
  auto impl = std::make_unique<LeafHooks::Impl>();
  impl->state = state_;
  impl->engine = engine;
  impl->owner = std::make_shared<const std::string>(owner);
  impl->places.reserve(leaves.size());
  // From here on the destructor takes off what a throw would leave behind.
  std::unique_ptr<LeafHooks> hooks(new LeafHooks(std::move(impl)));
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    hooks->impl_->places.push_back({leaves[i], nullptr});
    hooks->impl_->install(i);
    leaves[i].mutable_grad().reset();
  }
  return hooks;
}

}  // namespace tandem::hooks
