// engine/world.cpp: the public World over WorldState.
#include "comm/launcher.h"
#include "engine/in_process.h"
#include "engine/tcp_store.h"
#include "engine/world_state.h"
#include <tandem/engine.h>
#include <tandem/world.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>

namespace tandem {

namespace {

constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 366);

void check(const WorldOptions& options) {
  if (options.timeout.count() <= 0) {
    throw InvalidArgument("WorldOptions::timeout is " + std::to_string(options.timeout.count()) +
                          " ms; it is > 0");
  }
  if (options.timeout > kLongestTimeout) {
    throw InvalidArgument("WorldOptions::timeout is " + std::to_string(options.timeout.count()) +
                          " ms; it is at most a year: a wait without an end hides a dead rank");
  }
  if (options.ranks_per_node < 0) {
    throw InvalidArgument("WorldOptions::ranks_per_node is " +
                          std::to_string(options.ranks_per_node) +
                          "; it is >= 0 (0: as the hosts say)");
  }
  if (options.queue_delay_us < 0) {
    throw InvalidArgument("WorldOptions::queue_delay_us is " +
                          std::to_string(options.queue_delay_us) + "; it is >= 0");
  }
  const LossScaling& scaling = options.loss_scaling;
  const auto power_of_two = [](double value) {
    int exponent = 0;
    return std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
  };
  constexpr double kLargest = 0x1p127;
  if (!power_of_two(scaling.initial) || scaling.initial > kLargest ||
      scaling.initial < 1.0 / kLargest) {
    throw InvalidArgument("WorldOptions::loss_scaling.initial is " +
                          std::to_string(scaling.initial) +
                          "; it is a power of two that a float holds, such as 65536");
  }
  if (!power_of_two(scaling.growth_factor) || scaling.growth_factor < 1.0) {
    throw InvalidArgument("WorldOptions::loss_scaling.growth_factor is " +
                          std::to_string(scaling.growth_factor) +
                          "; it is a power of two, >= 1 (1: the scale never rises)");
  }
  if (!power_of_two(scaling.backoff_factor) || scaling.backoff_factor > 1.0) {
    throw InvalidArgument("WorldOptions::loss_scaling.backoff_factor is " +
                          std::to_string(scaling.backoff_factor) +
                          "; it is a power of two, <= 1 (1: the scale never falls)");
  }
  if (scaling.growth_interval <= 0) {
    throw InvalidArgument("WorldOptions::loss_scaling.growth_interval is " +
                          std::to_string(scaling.growth_interval) + " steps; it is > 0");
  }
}

}  // namespace

World World::from_environment(const WorldOptions& options) {
  check(options);
  return World(std::make_shared<engine::WorldState>(
      comm::rendezvous_from_environment(comm::Deadline::after(options.timeout),
                                        options.ranks_per_node, engine::open_tcp_store),
      options, engine::make_lanes(engine::Ranks::kProcesses)));
}

std::vector<World> World::in_process(int size, const WorldOptions& options) {
  check(options);
  const auto kind = size > 1 ? engine::Ranks::kThreads : engine::Ranks::kProcesses;
  return engine::make_in_process(size, options,
                                 [kind](int /*rank*/) { return engine::make_lanes(kind); });
}

World::World(std::shared_ptr<engine::WorldState> state)
    : state_(std::move(state)), uncaught_at_birth_(std::uncaught_exceptions()) {}

World::World(World&&) noexcept = default;

World::~World() {
  if (!state_ || state_->finished() || std::uncaught_exceptions() > uncaught_at_birth_) {
    return;
  }
  try {
    try {
      close();
    } catch (const BackwardFailed&) {  // said once; the world itself is whole
      close();
    } catch (const Mismatch&) {
      close();
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tandem: rank %d could not close its world: %s\n", rank(), error.what());
  }
}

int World::rank() const { return state_->group().rank; }
int World::size() const { return state_->group().size; }
c10::Device World::gpu() const { return state_->gpu(); }

void World::backward(const at::Tensor& loss, bool retain_graph) {
  state_->backward(loss, retain_graph);
}

void World::backward(const at::Tensor& loss, const BackwardOptions& options) {
  state_->backward(loss, options, nullptr);
}

StepResult World::step(const StepOptions& options) {
  std::vector<const engine::EngineCore*> engines;
  for (const EngineBase* engine : options.engines) {
    engines.push_back(&core_of(engine, "World::step"));
  }
  return state_->step(engines, options.clip_norm, options.norm_type);
}

void World::zero_grad() { state_->zero_grad(nullptr); }

Scope World::hold() { return Scope(state_, Scope::Kind::kHold); }

Scope World::only(std::initializer_list<const EngineBase*> engines) {
  std::vector<const engine::EngineCore*> cores;
  for (const EngineBase* engine : engines) {
    cores.push_back(&core_of(engine, "World::only"));
  }
  state_->push_only(cores);
  return Scope(state_, Scope::Kind::kOnly);
}

void World::count_tokens(const TokenCount& tokens) { state_->count_tokens(nullptr, tokens); }
void World::multiply_gradients(double factor) { state_->multiply_gradients(nullptr, factor); }
at::Tensor World::scale(const at::Tensor& loss) { return state_->scale(loss); }
double World::loss_scale() const { return state_->loss_scale(); }

double World::mean(double value) { return state_->value(engine::ValueOp::kMean, value, 0); }
double World::sum(double value) { return state_->value(engine::ValueOp::kSum, value, 0); }
bool World::any(bool value) {
  return state_->value(engine::ValueOp::kAny, value ? 1.0 : 0.0, 0) > 0.0;
}
double World::broadcast(double value, int root) {
  return state_->value(engine::ValueOp::kBroadcast, value, root);
}

Average World::average() const { return state_->average(); }
void World::set_average(Average average) { state_->set_average(average); }
std::int64_t World::updates() const { return state_->updates(); }

std::int64_t World::window() { return state_->window(); }
MemoryReport World::memory_report() const { return state_->memory_report(); }
WireReport World::wire_report() const { return state_->wire_report(); }
std::uint64_t World::parameter_hash() const { return state_->world_parameter_hash(); }
void World::trace(const std::string& path) { state_->start_trace(path); }
void World::stop_trace() { state_->trace().stop(); }
void World::leave() { state_->leave(); }
void World::close() { state_->close(); }

const engine::EngineCore& World::core_of(const EngineBase* engine, const char* call) const {
  if (engine == nullptr || engine->state_->world != state_) {
    throw InvalidArgument(std::string(call) + ": " +
                          (engine == nullptr
                               ? "a null engine"
                               : "engine '" + engine->name() + "' belongs to another world"));
  }
  return *engine->state_->core;
}

Scope::Scope(std::shared_ptr<engine::WorldState> state, Kind kind)
    : state_(std::move(state)), kind_(kind) {
  if (kind_ == Kind::kHold) {
    state_->push_hold(+1);
  }
}

Scope::Scope(Scope&& other) noexcept : state_(std::move(other.state_)), kind_(other.kind_) {}

Scope::~Scope() {
  if (!state_) {
    return;
  }
  if (kind_ == Kind::kHold) {
    state_->push_hold(-1);
  } else {
    state_->pop_only();
  }
}

}  // namespace tandem
