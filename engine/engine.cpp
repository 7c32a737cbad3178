// engine/engine.cpp: the public EngineBase over EngineCore.
#include "engine/world_state.h"
#include <tandem/engine.h>

#include <cmath>
#include <type_traits>
#include <utility>

namespace tandem {

namespace {

engine::Named named(NamedTensors tensors) {
  engine::Named pairs;
  for (NamedTensor& one : tensors) {
    pairs.emplace_back(std::move(one.name), std::move(one.tensor));
  }
  return pairs;
}

void check_setting(const char* what, double value) {
  if (!(value >= 0.0 && std::isfinite(value))) {
    throw InvalidArgument(std::string(what) + " " + std::to_string(value) +
                          "; it is finite and >= 0");
  }
}

std::int32_t index_of(const engine::EngineCore& core, const std::string& parameter) {
  for (std::size_t p = 0; p < core.infos.size(); ++p) {
    if (core.infos[p].name == parameter) {
      return static_cast<std::int32_t>(p);
    }
  }
  throw InvalidArgument("engine '" + core.name + "' owns no parameter '" + parameter + "'");
}

/// Under the world's lock; errors name the engine. What was set through the engine's
/// torch::optim::Optimizer is there before, and what `use` sets is there afterwards; what cannot be
/// adopted is the next step's to refuse.
template <class Use>
auto with_groups(const engine::EngineState& state, Use&& use) {
  return state.world->locked([&] {
    const auto exchange = [&] {
      if (state.core->adopt_settings) {
        state.core->adopt_settings();
      }
    };
    try {
      zero::ParameterGroups& groups = state.core->shard->groups();
      exchange();
      if constexpr (std::is_void_v<decltype(use(groups))>) {
        use(groups);
        exchange();
      } else {
        return use(groups);
      }
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("engine '" + state.core->name + "': " + error.what());
    }
  });
}

}  // namespace

namespace detail {

NamedTensors parameters_of(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    tensors.push_back({item.key(), item.value()});
  }
  return tensors;
}

NamedTensors buffers_of(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_buffers(/*recurse=*/true)) {
    tensors.push_back({item.key(), item.value()});
  }
  return tensors;
}

}  // namespace detail

EngineBase::EngineBase(World& world,
                       NamedTensors parameters,
                       NamedTensors buffers,
                       const EngineOptions& options)
    : state_(std::make_shared<engine::EngineState>(
          world.state_,
          world.state_->register_engine(
              named(std::move(parameters)), named(std::move(buffers)), options))) {}

EngineBase::~EngineBase() = default;

const std::string& EngineBase::name() const { return state_->core->name; }

EngineBase::ForwardSpan::ForwardSpan(const EngineBase& engine)
    : engine_(engine),
      begin_(engine.state_->world->trace().on() ? engine::Trace::now() : std::int64_t{-1}) {}

EngineBase::ForwardSpan::~ForwardSpan() {
  if (begin_ >= 0) {
    engine_.state_->world->trace().span("forward", engine::Trace::Row::kUser, begin_,
                                        {.engine = engine_.state_->core->serial});
  }
}

void EngineBase::track_tensor(const at::Tensor& output) {
  state_->world->track(*state_->core, output);
}

void EngineBase::backward(const at::Tensor& loss, bool retain_graph) {
  backward_prologue();
  state_->world->backward(loss, retain_graph);
}

void EngineBase::backward(const at::Tensor& loss, const BackwardOptions& options) {
  backward_prologue();
  state_->world->backward(loss, options, state_->core.get());
}

void EngineBase::backward_prologue() { state_->world->prologue(*state_->core); }

void EngineBase::backward_epilogue() { state_->world->epilogue(); }

std::int64_t EngineBase::prologues() const {
  return state_->world->locked([&] { return state_->core->prologues; });
}

std::int64_t EngineBase::epilogues() const {
  return state_->world->locked([&] { return state_->core->epilogues; });
}

void EngineBase::zero_grad() { state_->world->zero_grad(state_->core.get()); }

void EngineBase::count_tokens(const TokenCount& tokens) {
  state_->world->count_tokens(state_->core.get(), tokens);
}

void EngineBase::multiply_gradients(double factor) {
  state_->world->multiply_gradients(state_->core.get(), factor);
}

at::Tensor EngineBase::gradient(const std::string& parameter) {
  return state_->world->gradient(*state_->core, index_of(*state_->core, parameter));
}

// Group 0 are the settings of the engine itself (zero/parameter_groups.h).

void EngineBase::set_learning_rate(double lr) {
  check_setting("learning rate", lr);
  with_groups(*state_, [&](zero::ParameterGroups& groups) { groups.set_learning_rate(0, lr); });
}

void EngineBase::set_learning_rate(double lr, const std::string& group) {
  check_setting("learning rate", lr);
  with_groups(*state_, [&](zero::ParameterGroups& groups) {
    groups.set_learning_rate(groups.find(group), lr);
  });
}

void EngineBase::set_weight_decay(double weight_decay) {
  check_setting("weight decay", weight_decay);
  with_groups(*state_,
              [&](zero::ParameterGroups& groups) { groups.set_weight_decay(0, weight_decay); });
}

void EngineBase::set_weight_decay(double weight_decay, const std::string& group) {
  check_setting("weight decay", weight_decay);
  with_groups(*state_, [&](zero::ParameterGroups& groups) {
    groups.set_weight_decay(groups.find(group), weight_decay);
  });
}

double EngineBase::learning_rate() const {
  return with_groups(*state_,
                     [](zero::ParameterGroups& groups) { return groups.learning_rate(0); });
}

double EngineBase::learning_rate(const std::string& group) const {
  return with_groups(*state_, [&](zero::ParameterGroups& groups) {
    return groups.learning_rate(groups.find(group));
  });
}

double EngineBase::weight_decay() const {
  return with_groups(*state_, [](zero::ParameterGroups& groups) { return groups.weight_decay(0); });
}

double EngineBase::weight_decay(const std::string& group) const {
  return with_groups(*state_, [&](zero::ParameterGroups& groups) {
    return groups.weight_decay(groups.find(group));
  });
}

std::vector<std::string> EngineBase::groups() const {
  return with_groups(*state_, [](zero::ParameterGroups& groups) {
    std::vector<std::string> names;
    for (std::size_t g = 1; g < groups.size(); ++g) {
      names.push_back(groups.name(g));
    }
    return names;
  });
}

bool EngineBase::has_own_learning_rate(const std::string& group) const {
  return with_groups(*state_, [&](zero::ParameterGroups& groups) {
    return groups.owns_learning_rate(groups.find(group));
  });
}

EngineOptimizer& EngineBase::optimizer() {
  if (!optimizer_) {
    optimizer_.reset(new EngineOptimizer(*state_));  // its constructor is the engine's alone
  }
  return *optimizer_;
}

std::int64_t EngineBase::step_count(const std::string& parameter) const {
  const engine::EngineCore& core = *state_->core;
  const std::int32_t index = index_of(core, parameter);
  return state_->world->locked([&] { return core.shard->step_count(index); });
}

std::int64_t EngineBase::buckets() const {
  return static_cast<std::int64_t>(state_->core->bucket_count());
}

std::uint64_t EngineBase::parameter_hash() const {
  return state_->world->engine_parameter_hash(*state_->core);
}

}  // namespace tandem
