// engine/engine_optimizer.cpp: an engine as a torch::optim::Optimizer; see
// tandem/engine_optimizer.h.
//
// Settings are kept twice: by the engine's groups, and by LibTorch's options objects, which anyone
// may write at any time without telling. `shown_` is what both were when they were last the same:
// where the options differ from it, somebody has set them since; else the groups go before.
// exchange() runs before each step and around each accessor of the engine, so that of two changes
// the later one stands.
#include "engine/world_state.h"
#include "zero/parameter_groups.h"
#include "zero/update_rule.h"
#include <tandem/engine_optimizer.h>
#include <tandem/error.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>

namespace tandem {

namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;

// --- Tandem's settings and LibTorch's ---

torch::optim::AdamWOptions options_of(const AdamW& o) {
  return torch::optim::AdamWOptions(o.lr)
      .betas({o.beta1, o.beta2})
      .eps(o.eps)
      .weight_decay(o.weight_decay)
      .amsgrad(o.amsgrad);
}

torch::optim::AdamOptions options_of(const Adam& o) {
  return torch::optim::AdamOptions(o.lr)
      .betas({o.beta1, o.beta2})
      .eps(o.eps)
      .weight_decay(o.weight_decay)
      .amsgrad(o.amsgrad);
}

torch::optim::SGDOptions options_of(const Sgd& o) {
  return torch::optim::SGDOptions(o.lr)
      .momentum(o.momentum)
      .dampening(o.dampening)
      .weight_decay(o.weight_decay)
      .nesterov(o.nesterov);
}

torch::optim::RMSpropOptions options_of(const RmsProp& o) {
  return torch::optim::RMSpropOptions(o.lr)
      .alpha(o.alpha)
      .eps(o.eps)
      .weight_decay(o.weight_decay)
      .momentum(o.momentum)
      .centered(o.centered);
}

torch::optim::AdagradOptions options_of(const Adagrad& o) {
  return torch::optim::AdagradOptions(o.lr)
      .lr_decay(o.lr_decay)
      .weight_decay(o.weight_decay)
      .initial_accumulator_value(o.initial_accumulator_value)
      .eps(o.eps);
}

LionOptions options_of(const Lion& o) {
  return LionOptions(o.lr).betas({o.beta1, o.beta2}).weight_decay(o.weight_decay);
}

AdamW settings_of(const torch::optim::AdamWOptions& o, const AdamW&) {
  return {.lr = o.lr(),
          .beta1 = std::get<0>(o.betas()),
          .beta2 = std::get<1>(o.betas()),
          .eps = o.eps(),
          .weight_decay = o.weight_decay(),
          .amsgrad = o.amsgrad()};
}

Adam settings_of(const torch::optim::AdamOptions& o, const Adam&) {
  return {.lr = o.lr(),
          .beta1 = std::get<0>(o.betas()),
          .beta2 = std::get<1>(o.betas()),
          .eps = o.eps(),
          .weight_decay = o.weight_decay(),
          .amsgrad = o.amsgrad()};
}

Sgd settings_of(const torch::optim::SGDOptions& o, const Sgd&) {
  return {.lr = o.lr(),
          .momentum = o.momentum(),
          .weight_decay = o.weight_decay(),
          .dampening = o.dampening(),
          .nesterov = o.nesterov()};
}

RmsProp settings_of(const torch::optim::RMSpropOptions& o, const RmsProp&) {
  return {.lr = o.lr(),
          .alpha = o.alpha(),
          .eps = o.eps(),
          .weight_decay = o.weight_decay(),
          .momentum = o.momentum(),
          .centered = o.centered()};
}

Adagrad settings_of(const torch::optim::AdagradOptions& o, const Adagrad&) {
  return {.lr = o.lr(),
          .lr_decay = o.lr_decay(),
          .weight_decay = o.weight_decay(),
          .initial_accumulator_value = o.initial_accumulator_value(),
          .eps = o.eps()};
}

Lion settings_of(const LionOptions& o, const Lion&) {
  return {.lr = o.lr(),
          .beta1 = std::get<0>(o.betas()),
          .beta2 = std::get<1>(o.betas()),
          .weight_decay = o.weight_decay()};
}

std::unique_ptr<OptimizerOptions> new_options(const Optimizer& settings) {
  return std::visit(
      [](const auto& o) -> std::unique_ptr<OptimizerOptions> {
        return std::make_unique<decltype(options_of(o))>(options_of(o));
      },
      settings);
}

/// Of the same kind as `kind`; nothing if the options are another optimizer's.
std::optional<Optimizer> read(const OptimizerOptions& options, const Optimizer& kind) {
  return std::visit(
      [&](const auto& o) -> std::optional<Optimizer> {
        const auto* typed = dynamic_cast<const decltype(options_of(o))*>(&options);
        return typed == nullptr ? std::nullopt : std::optional<Optimizer>(settings_of(*typed, o));
      },
      kind);
}

void write(OptimizerOptions& options, const Optimizer& settings) {
  std::visit(
      [&](const auto& o) {
        auto& typed = dynamic_cast<decltype(options_of(o))&>(options);
        typed.set_lr(o.lr);
        typed.weight_decay(o.weight_decay);
      },
      settings);
}

struct Tuned {
  double lr;
  double weight_decay;
};
Tuned tuned(const Optimizer& settings) {
  return std::visit([](const auto& o) { return Tuned{o.lr, o.weight_decay}; }, settings);
}
Optimizer with(Optimizer settings, const Tuned& tuned) {
  std::visit(
      [&](auto& o) {
        o.lr = tuned.lr;
        o.weight_decay = tuned.weight_decay;
      },
      settings);
  return settings;
}

/// The parameters of each group.
std::vector<std::vector<at::Tensor>> grouped_parameters(const engine::EngineCore& core) {
  const zero::ParameterGroups& groups = core.shard->groups();
  std::vector<std::vector<at::Tensor>> grouped(groups.size());
  const std::vector<at::Tensor>& tensors = core.parameters->tensors();
  for (std::size_t p = 0; p < tensors.size(); ++p) {
    grouped[groups.group_of(p)].push_back(tensors[p]);
  }
  return grouped;
}

std::vector<OptimizerParamGroup> groups_of(const engine::EngineState& state) {
  return state.world->locked([&] {
    std::vector<OptimizerParamGroup> result;
    std::vector<std::vector<at::Tensor>> grouped = grouped_parameters(*state.core);
    for (std::size_t g = 0; g < grouped.size(); ++g) {
      result.emplace_back(std::move(grouped[g]),
                          new_options(state.core->shard->groups().settings(g)));
    }
    return result;
  });
}

std::unique_ptr<OptimizerOptions> defaults_of(const engine::EngineState& state) {
  return state.world->locked([&] { return new_options(state.core->shard->groups().settings(0)); });
}

bool same_tensors(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

}  // namespace

EngineOptimizer::EngineOptimizer(engine::EngineState& state)
    : torch::optim::Optimizer(groups_of(state), defaults_of(state)), state_(state) {
  state_.world->locked([&] {
    const zero::ParameterGroups& groups = state_.core->shard->groups();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      shown_.push_back(groups.settings(g));
    }
    state_.core->adopt_settings = [this] { return exchange(); };
  });
}

EngineOptimizer::~EngineOptimizer() {
  state_.world->locked([&] { state_.core->adopt_settings = nullptr; });
}

std::string EngineOptimizer::exchange() {
  engine::EngineCore& core = *state_.core;
  zero::ParameterGroups& groups = core.shard->groups();
  const std::string where = "the torch::optim::Optimizer of engine '" + core.name + "'";
  const std::vector<std::vector<at::Tensor>> grouped = grouped_parameters(core);
  if (param_groups().size() != groups.size()) {
    return where + " has " + std::to_string(param_groups().size()) +
           " parameter groups, the engine " + std::to_string(groups.size()) +
           "; groups are given in EngineOptions when it is made";
  }
  std::string problem;
  const auto refuse = [&](std::size_t group, const std::string& what) {
    if (problem.empty()) {
      problem = where + ", group " + std::to_string(group) + ": " + what;
    }
  };
  for (std::size_t g = 0; g < groups.size(); ++g) {
    OptimizerParamGroup& group = param_groups()[g];
    if (!same_tensors(group.params(), grouped[g])) {
      refuse(g, "its parameters are not the engine's; they are fixed when the engine is made");
      continue;
    }
    const std::optional<tandem::Optimizer> said =
        group.has_options() ? read(group.options(), shown_[g]) : std::nullopt;
    if (!said) {
      refuse(g, "its options were replaced by others than " + zero::describe(shown_[g]) + "'s");
      continue;
    }
    const Tuned now = tuned(*said);
    const Tuned before = tuned(shown_[g]);
    if (zero::describe(with(*said, before)) != zero::describe(shown_[g])) {
      refuse(g, "only learning rate and weight decay can be changed; it says " +
                    zero::describe(*said) + ", the engine was made with " +
                    zero::describe(with(shown_[g], now)));
      continue;
    }
    const Tuned engine = tuned(groups.settings(g));
    const Tuned next{
        now.lr != before.lr ? now.lr : engine.lr,
        now.weight_decay != before.weight_decay ? now.weight_decay : engine.weight_decay};
    if (!(next.lr >= 0.0 && std::isfinite(next.lr) && next.weight_decay >= 0.0 &&
          std::isfinite(next.weight_decay))) {
      refuse(g, "learning rate " + std::to_string(next.lr) + ", weight decay " +
                    std::to_string(next.weight_decay) + "; they are finite and >= 0");
      continue;
    }
    groups.adopt(g, next.lr, next.weight_decay);
    shown_[g] = groups.settings(g);
    write(group.options(), shown_[g]);
  }
  return problem;
}

at::Tensor EngineOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  const StepOptions options;
  last_result_ = state_.world->step({state_.core.get()}, options.clip_norm, options.norm_type);
  return loss;
}

void EngineOptimizer::zero_grad() { state_.world->zero_grad(state_.core.get()); }

void EngineOptimizer::save(torch::serialize::OutputArchive& /*archive*/) const {
  throw InvalidArgument(
      "engine '" + state_.core->name +
      "': its optimizer's states are spread over the ranks and cannot be saved as torch::optim's; "
      "there are no checkpoints of them yet. torch::save(engine.ptr(), file) on one rank saves the "
      "parameters; positions of schedules are yours to save");
}

void EngineOptimizer::load(torch::serialize::InputArchive& /*archive*/) {
  throw InvalidArgument(
      "engine '" + state_.core->name +
      "': its optimizer's states are spread over the ranks and cannot be loaded as torch::optim's; "
      "there are no checkpoints of them yet. torch::load() of the module loads parameters");
}

}  // namespace tandem
