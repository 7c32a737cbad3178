// tandem/engine.h: one model whose gradients and optimizer states are spread over the ranks.
#pragma once

#include <tandem/engine_optimizer.h>
#include <tandem/options.h>
#include <tandem/outputs.h>
#include <tandem/world.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tandem {

namespace engine {
struct EngineState;
}

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};
using NamedTensors = std::vector<NamedTensor>;

/// What does not depend on the module's type. Lifetime: the engine keeps its module alive; the
/// module and its parameters may outlive the engine, whose destruction takes its hooks off and
/// communicates nothing: they are plain LibTorch again, and may be wrapped anew. Engines are
/// destroyed at the same point of the program on every rank.
///
/// Parameters may be edited between passes and steps, under NoGradGuard as ever: in place (clamp_,
/// copy_, init), or by torch::load, set_data and other ways of giving them other memory. Training
/// goes on from the edited values; moments and step counts stay. The same edit on every rank is the
/// user's duty: else each element becomes what the rank that owns it says, with its next update.
/// Another type, shape or device is refused by the next pass or step, on all ranks alike, with all
/// windows discarded; a tensor belongs to one engine, the first that was given it.
///
/// `.grad` of a parameter is empty after a pass, so that a torch::optim optimizer over wrapped
/// parameters steps nothing, and zero_grad() of optimizer or module does nothing. What is put into
/// `.grad` by hand is added to the next pass, or refused by the step.
class EngineBase {
 public:
  ~EngineBase();
  EngineBase(const EngineBase&) = delete;
  EngineBase& operator=(const EngineBase&) = delete;
  EngineBase(EngineBase&&) = delete;
  EngineBase& operator=(EngineBase&&) = delete;

  [[nodiscard]] const std::string& name() const;

  /// Tells Tandem that `outputs` come from this engine: what forward() does by itself; for modules
  /// that are called in another way. Without it everything is still right, with less overlap in the
  /// first buckets.
  template <class Outputs>
  void track(const Outputs& outputs) {
    for_each_tensor(outputs, [this](const at::Tensor& tensor) { track_tensor(tensor); });
  }

  /// backward_prologue(), loss.backward(), backward_epilogue(), with errors as World::backward()
  /// has them. For code with one engine.
  void backward(const at::Tensor& loss, bool retain_graph = false);
  /// The same with a weight, which is counted for this engine only.
  void backward(const at::Tensor& loss, const BackwardOptions& options);
  /// Runs once for each pass that reaches this engine, before any of its gradients: called by the
  /// hooks. Inside a graph task it joins the pass; outside it only arms the engine for the next
  /// pass.
  void backward_prologue();
  /// Runs once for each pass that reached this engine, after all its gradients: called by the
  /// hooks. Called outside a graph task it only resolves the last pass: throws what that pass
  /// failed with elsewhere.
  void backward_epilogue();
  /// How often the two have run, for passes.
  [[nodiscard]] std::int64_t prologues() const;
  [[nodiscard]] std::int64_t epilogues() const;

  /// Empties this engine's window on all ranks. Collective.
  void zero_grad();
  /// Adds tokens to this engine's count of the current window; see Average::kTokens.
  void count_tokens(const TokenCount& tokens);
  /// Multiplies what is accumulated in this engine's window; see World::multiply_gradients().
  void multiply_gradients(double factor);
  /// For debugging: the gradient of a parameter (by its name in the module) as a step would apply
  /// it now, before clipping: summed over ranks, averaged, multiplied, without the loss scale.
  /// fp32, of the parameter's shape and device; undefined if no rank's pass reached the parameter.
  /// Collective; ranks at their step join. Passes that are held travel now. Throws InvalidArgument
  /// for an unknown name, and as step() does where tokens were not counted.
  [[nodiscard]] at::Tensor gradient(const std::string& parameter);

  /// Of the engine and of those parameter groups that give none of their own; or of the named
  /// group, which has its own from then on. Between steps, the same on all ranks (compared at the
  /// step). Throw InvalidArgument on NaN or < 0, and for an unknown group.
  void set_learning_rate(double lr);
  void set_learning_rate(double lr, const std::string& group);
  void set_weight_decay(double weight_decay);
  void set_weight_decay(double weight_decay, const std::string& group);
  [[nodiscard]] double learning_rate() const;
  [[nodiscard]] double learning_rate(const std::string& group) const;
  [[nodiscard]] double weight_decay() const;
  [[nodiscard]] double weight_decay(const std::string& group) const;
  /// Names of the parameter groups, in the order of EngineOptions::groups.
  [[nodiscard]] std::vector<std::string> groups() const;
  /// False while the group follows the engine's.
  [[nodiscard]] bool has_own_learning_rate(const std::string& group) const;

  /// The engine as a torch::optim::Optimizer: for LibTorch's schedulers, and for code that holds an
  /// optimizer. One object, the engine's; see EngineOptimizer. Not collective.
  [[nodiscard]] EngineOptimizer& optimizer();

  /// Updates a parameter has seen, by its name in the module. Throws InvalidArgument for an unknown
  /// name.
  [[nodiscard]] std::int64_t step_count(const std::string& parameter) const;
  /// Buckets this engine's gradients are cut into.
  [[nodiscard]] std::int64_t buckets() const;
  [[nodiscard]] std::uint64_t parameter_hash() const;

 protected:
  /// Collective. Throws InvalidArgument (name used twice, unsupported parameter type, zero bucket
  /// bytes, bad optimizer settings), Mismatch (layouts that differ across ranks), OutOfMemory: on
  /// all ranks alike.
  EngineBase(World& world,
             NamedTensors parameters,
             NamedTensors buffers,
             const EngineOptions& options);
  void track_tensor(const at::Tensor& output);
  /// A forward, for the trace.
  class ForwardSpan {
   public:
    explicit ForwardSpan(const EngineBase& engine);
    ~ForwardSpan();
    ForwardSpan(const ForwardSpan&) = delete;
    ForwardSpan& operator=(const ForwardSpan&) = delete;
    ForwardSpan(ForwardSpan&&) = delete;
    ForwardSpan& operator=(ForwardSpan&&) = delete;

   private:
    const EngineBase& engine_;
    std::int64_t begin_;  // -1: nothing is recorded
  };

 private:
  friend class World;
  std::shared_ptr<engine::EngineState> state_;
  std::unique_ptr<EngineOptimizer> optimizer_;  // none until it is asked for
};

namespace detail {

template <class T>
struct ModuleOf {  // a class derived from torch::nn::Module, given by value
  using Impl = T;
  static std::shared_ptr<Impl> share(T module) { return std::make_shared<T>(std::move(module)); }
};
template <class T>
struct ModuleOf<std::shared_ptr<T>> {
  using Impl = T;
  static std::shared_ptr<Impl> share(std::shared_ptr<T> module) { return module; }
};
template <class T>
concept Holder = requires {
  typename T::ContainedType;
  requires std::derived_from<T, torch::nn::ModuleHolder<typename T::ContainedType>>;
};
template <Holder T>
struct ModuleOf<T> {
  using Impl = typename T::ContainedType;
  static std::shared_ptr<Impl> share(T module) { return module.ptr(); }
};

NamedTensors parameters_of(const torch::nn::Module& module);
NamedTensors buffers_of(const torch::nn::Module& module);

}  // namespace detail

/// An engine over a module: `Engine images(world, ImageTower(), {.name = "images"})`. Takes a
/// ModuleHolder, a shared_ptr to a module, or a module by value.
template <class Module>
class Engine : public EngineBase {
  using Traits = detail::ModuleOf<Module>;

 public:
  using Impl = typename Traits::Impl;
  static_assert(std::derived_from<Impl, torch::nn::Module>,
                "an Engine takes a torch::nn::Module, its holder, or a list of named tensors");

  Engine(World& world, Module module, const EngineOptions& options = {})
      : Engine(world, Traits::share(std::move(module)), options, 0) {}

  /// The module's own forward; its outputs are tracked.
  template <class... Args>
  auto forward(Args&&... args) {
    const ForwardSpan span(*this);
    auto outputs = module_->forward(std::forward<Args>(args)...);
    track(outputs);
    return outputs;
  }

  [[nodiscard]] Impl& module() { return *module_; }
  Impl* operator->() { return module_.get(); }
  [[nodiscard]] std::shared_ptr<Impl> ptr() const { return module_; }

 private:
  Engine(World& world, std::shared_ptr<Impl> module, const EngineOptions& options, int)
      : EngineBase(world, detail::parameters_of(*module), detail::buffers_of(*module), options),
        module_(std::move(module)) {}

  std::shared_ptr<Impl> module_;
};

/// An engine over tensors that belong to no module (a learned temperature, log-alpha):
/// `Engine head(world, {{"log_temperature", t}}, {.name = "head"})`.
template <>
class Engine<NamedTensors> : public EngineBase {
 public:
  Engine(World& world, NamedTensors tensors, const EngineOptions& options = {})
      : EngineBase(world, std::move(tensors), {}, options) {}
};

Engine(World&, NamedTensors, EngineOptions)->Engine<NamedTensors>;
Engine(World&, NamedTensors)->Engine<NamedTensors>;
template <class Module>
Engine(World&, Module, EngineOptions) -> Engine<Module>;
template <class Module>
Engine(World&, Module) -> Engine<Module>;

}  // namespace tandem
