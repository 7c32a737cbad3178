// tandem/world.h: the ranks that train together, and what their engines do jointly.
#pragma once

#include <tandem/error.h>
#include <tandem/options.h>
#include <tandem/report.h>
#include <tandem/token_count.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace at {
class Tensor;
}
namespace c10 {
struct Device;
}

namespace tandem {

class EngineBase;

namespace engine {
class WorldState;
struct EngineCore;
struct WorldMaker;
}  // namespace engine

/// A scope: see World::hold() and World::only(). Scopes end in the reverse order of their making,
/// on the thread that made them.
class [[nodiscard]] Scope {
 public:
  Scope(Scope&& other) noexcept;
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  Scope& operator=(Scope&&) = delete;

 private:
  friend class World;
  enum class Kind : std::uint8_t { kHold, kOnly };
  Scope(std::shared_ptr<engine::WorldState> state, Kind kind);
  std::shared_ptr<engine::WorldState> state_;  // null when moved from
  Kind kind_;
};

/// The ranks of one run. Owns communicators, queues, the order of collectives and the registration
/// of engines; nothing is global, so worlds may be made one after another.
///
/// Thread safety: one thread at a time, the one that calls backward. Calls marked collective are
/// made by every rank, in the same order; ranks that are still in a backward pass, or have run out
/// of data, are waited for or joined as docs/agreement.md says. Every collective call may throw
/// Timeout, Mismatch, BackwardFailed and WorldBroken.
class World {
 public:
  /// The ranks of mpirun, torchrun or srun, on one host or several; those of a host share memory.
  /// Started alone: one rank. Collective. Throws SystemError if what the launcher says cannot be
  /// kept (N silent worlds of one, a missing variable, MPI without threads), Timeout.
  static World from_environment(const WorldOptions& options = {});

  /// `size` ranks in this process, one for each thread that the caller runs: move each World into
  /// its rank's thread and let it end there (closing is collective). For tests and debugging.
  static std::vector<World> in_process(int size, const WorldOptions& options = {});

  World(World&&) noexcept;
  /// Calls close() unless the stack is unwinding or the world is broken; never throws.
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  World& operator=(World&&) = delete;

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;
  /// The GPU for this rank's models: `net->to(world.gpu())` before wrapping them. The ranks of a
  /// host take its GPUs in turn (those that CUDA_VISIBLE_DEVICES leaves). Loads LibTorch's CUDA
  /// library, which must happen before LibTorch is asked about CUDA (torch::manual_seed does). Not
  /// collective. Throws DeviceError, saying what is missing, where there is none.
  [[nodiscard]] c10::Device gpu() const;

  // --- training ---

  /// loss.backward(), then the pass is resolved at once: if it failed on any rank, every rank
  /// throws (the original exception where it was thrown, BackwardFailed elsewhere). Plain
  /// loss.backward() does as well and learns of failures elsewhere at the next collective call.
  void backward(const at::Tensor& loss, bool retain_graph = false);
  /// The same with a weight: `world.backward(mean_loss, {.weight = tokens})`. Throws
  /// InvalidArgument for a weight unless the world averages by tokens.
  void backward(const at::Tensor& loss, const BackwardOptions& options);

  /// The loss times the world's loss scale, for 16-bit gradients that would vanish:
  /// `world.scale(loss).backward()`. There is one scale, as losses are shared: from the first call
  /// on every loss of this world must go through it. The step divides by it again. Where a gradient
  /// is not finite, on any rank, every engine of the step is skipped and the scale falls; after
  /// LossScaling::growth_interval applied steps in a row it rises; a change multiplies the windows
  /// that are open elsewhere. Not collective; ranks that differ are told at the pass.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  /// That the next loss is multiplied by; 1 before the first scale().
  [[nodiscard]] double loss_scale() const;

  /// Multiplies what is accumulated in the windows of all engines so far (Engine: of one) by
  /// `factor`, in fp32, held passes included; later passes of the window are not. Calls multiply.
  /// 0 gives zero gradients: parameters are still decayed. Counted by norm, clip and
  /// Engine::gradient(). A touch, free of communication: ranks that give different factors are told
  /// at the next pass or step, with all gradients kept where it is a step. Throws InvalidArgument
  /// unless finite.
  void multiply_gradients(double factor);

  /// The joint step. Waits for the reductions, takes one norm and one verdict over the engines of
  /// the step, updates this rank's shards and gathers parameters, which are safe to use when it
  /// returns. Engines that no pass reached are left alone. Collective; a rank that has run out of
  /// data just calls it, others' passes are then counted as zeros here. The windows of the stepped
  /// engines are empty afterwards, applied or not. Throws InvalidArgument (clip_norm or norm_type
  /// not > 0, an engine of another world or twice; on all ranks: a parameter that some rank cannot
  /// train any more, see EngineBase).
  StepResult step(const StepOptions& options = {});

  /// Empties the windows of all engines (or of one: Engine::zero_grad) on all ranks. Collective.
  void zero_grad();

  /// While the scope lives, passes of stage-1 engines are summed locally, in fp32, and travel once,
  /// with the first later pass or the step. Honoured in a pass if every rank that runs it holds.
  Scope hold();

  /// While the scope lives, gradients arriving at other engines are dropped and nothing of theirs
  /// is reduced (a GAN's generator pass). The same on all ranks, or an error.
  Scope only(std::initializer_list<const EngineBase*> engines);

  /// Adds tokens to the count of the current window, for every engine; see Average::kTokens. The
  /// counts travel with the step.
  void count_tokens(const TokenCount& tokens);

  /// Divisor of every engine's gradients: WorldOptions::average, until it is set.
  [[nodiscard]] Average average() const;
  /// From the next step on; the same on all ranks. Throws InvalidArgument while a window holds
  /// gradients.
  void set_average(Average average);

  // --- small joint values: each rank's are combined in rank order, in double; the same result on
  // all ranks. Collective. Ranks that are at their step join without a value. ---

  [[nodiscard]] double mean(double value);  // over the ranks that called it
  [[nodiscard]] double sum(double value);
  [[nodiscard]] bool any(bool value);
  /// `value` of rank `root`, which must take part.
  [[nodiscard]] double broadcast(double value, int root = 0);

  // --- looking ---

  /// Steps that were applied so far.
  [[nodiscard]] std::int64_t updates() const;
  /// Passes held by the current windows, after resolving the last one: 0 after a failed pass
  /// (repeat the window from its first pass) or after a step or zero_grad that emptied all windows.
  /// A touch, not collective by itself.
  [[nodiscard]] std::int64_t window();

  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] WireReport wire_report() const;
  /// XXH3 over the names of engines and the names, shapes, types and bits of their parameters on
  /// this rank, in registration order. Equal on all ranks after a step. Not collective.
  [[nodiscard]] std::uint64_t parameter_hash() const;

  /// Records what this rank does (forward, backward, arrivals, launches, folds, waits, step,
  /// gather) until stop_trace() or close(), then writes it to `path`, as JSON that chrome://tracing
  /// and ui.perfetto.dev show; with several ranks to "name.rank<r>.json" for "name.json". At most
  /// 2,000,000 events; what is dropped is counted in the file. Ends a recording that runs. Not
  /// collective. Throws InvalidArgument if the file cannot be opened.
  void trace(const std::string& path);
  /// Ends a recording and writes its file. Throws SystemError if that fails.
  void stop_trace();

  /// No more steps from this rank; the others go on. A rank that has left still takes its part in
  /// their passes and steps (it owns shards) and returns when all ranks have left. Collective in
  /// that sense.
  void leave();

  /// The orderly end: leave(), then the communicators are closed. Idempotent.
  void close();

 private:
  friend class EngineBase;
  friend struct engine::WorldMaker;
  explicit World(std::shared_ptr<engine::WorldState> state);
  [[nodiscard]] const engine::EngineCore& core_of(const EngineBase* engine, const char* call) const;
  std::shared_ptr<engine::WorldState> state_;
  int uncaught_at_birth_ = 0;
};

}  // namespace tandem
