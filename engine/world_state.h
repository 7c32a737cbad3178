// engine/world_state.h: one rank's side of a world: its planes, its queue, its engines and the open
// pass.
//
// Who does what. The user's thread runs backward (and with it pass.cpp), touches (touches.cpp)
// and steps (step.cpp). The queue's thread folds buckets. The progress thread takes merged rounds
// while the user's thread computes, so that launches do not wait for the next gradient. One lock
// covers everything below; nobody holds it while sleeping on a plane, but for the step, during
// which nobody else needs it.
//
// W1 Rounds are posted under the lock, in order; no gate before the previous close is resolved.
// W2 Between the gate of a pass and its close this rank waits for nothing (I5).
// W3 Once broken, every call says so; a broken world never communicates again.
// Files: world_state.cpp (life, progress), agreement.cpp (gates, waits), explanations.cpp (errors
// of a gate in words), touches.cpp (the small collective calls), pass.cpp (hooks to sequencer to
// launches), arithmetic.cpp (multipliers, token counts, the loss scale), gradient.cpp (one
// parameter's gradient), step.cpp (the step), joint_norm.cpp, module_buffers.cpp, registration.cpp
// (engines come and go), parameters.cpp (what users did to parameters), reports.cpp.
#pragma once

#include "comm/control_plane.h"
#include "comm/data_plane.h"
#include "comm/rendezvous.h"
#include "engine/engine_core.h"
#include "engine/lane.h"
#include "engine/messages.h"
#include "engine/sequencer.h"
#include "engine/trace.h"
#include "hooks/pass_tracker.h"
#include "kernels/queue.h"
#include <tandem/error.h>
#include <tandem/options.h>
#include <tandem/report.h>
#include <tandem/token_count.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tandem::engine {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

/// Throws what a room below could not say in the public types: OutOfMemory or DeviceError, with
/// `where` before its words.
[[noreturn]] void throw_public(const kernels::DeviceError& error, const std::string& where = {});

class WorldState : public hooks::PassSink {
 public:
  WorldState(std::unique_ptr<comm::Rendezvous> rendezvous,
             const WorldOptions& options,
             std::unique_ptr<Lanes> lanes);
  /// Stops the threads; tells the peers if the world was never closed; waits for nobody.
  ~WorldState() override;
  WorldState(const WorldState&) = delete;
  WorldState& operator=(const WorldState&) = delete;
  WorldState(WorldState&&) = delete;
  WorldState& operator=(WorldState&&) = delete;

  [[nodiscard]] comm::Group group() const { return group_; }
  [[nodiscard]] c10::Device gpu() const;
  [[nodiscard]] Average average() const;
  /// Throws InvalidArgument while a window holds a pass.
  void set_average(Average average);
  /// Applied steps.
  [[nodiscard]] std::int64_t updates() const;

  // --- touches.cpp ---
  void backward(const at::Tensor& loss, bool retain_graph);
  /// `only`: whose tokens a weight counts; null: all engines'.
  void backward(const at::Tensor& loss, const BackwardOptions& options, const EngineCore* only);
  void resolve_pass();
  double value(ValueOp op, double value, int root);
  void zero_grad(const EngineCore* only);  // null: all
  std::int64_t window();
  void leave();
  void close();
  [[nodiscard]] bool finished() const;  // closed or broken

  // --- step.cpp ---
  StepResult step(const std::vector<const EngineCore*>& engines,
                  std::optional<double> clip_norm,
                  double norm_type);

  // --- registration.cpp ---
  std::shared_ptr<EngineCore> register_engine(const Named& parameters,
                                              const Named& buffers,
                                              const EngineOptions& options);
  void retire_engine(EngineCore& core) noexcept;

  // --- pass.cpp ---
  void track(EngineCore& core, const at::Tensor& output);
  void prologue(EngineCore& core);
  void epilogue();
  void push_hold(int change);
  void push_only(const std::vector<const EngineCore*>& engines);
  void pop_only();

  // --- arithmetic.cpp; `only` null: all engines ---
  void count_tokens(const EngineCore* only, const TokenCount& tokens);
  void multiply_gradients(const EngineCore* only, double factor);
  at::Tensor scale(const at::Tensor& loss);
  [[nodiscard]] double loss_scale() const;

  // --- gradient.cpp ---
  at::Tensor gradient(const EngineCore& core, std::int32_t parameter);

  // hooks::PassSink
  void opened() override;
  void reached(std::int32_t serial) override;
  void arrived(std::int32_t serial, std::int32_t parameter, at::Tensor gradient) override;
  void closed() override;
  void abandoned() noexcept override;

  // --- reports.cpp ---
  [[nodiscard]] MemoryReport memory_report() const;
  [[nodiscard]] WireReport wire_report() const;
  [[nodiscard]] std::uint64_t world_parameter_hash();
  [[nodiscard]] std::uint64_t engine_parameter_hash(EngineCore& core);

  /// Shared with the queue's jobs. Off until somebody starts it.
  [[nodiscard]] Trace& trace() const { return *trace_; }
  void start_trace(const std::string& path);

  /// Runs `read` under the lock: for accessors of one engine.
  template <class Read>
  auto locked(Read&& read) const {
    const std::lock_guard lock(mutex_);
    return read();
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // agreement.cpp
  void check_usable() const;
  [[nodiscard]] comm::Deadline deadline() const { return comm::Deadline::after(options_.timeout); }
  template <class Take>
  auto await(Lock& lock, comm::RoundId round, const std::string& what, Take&& take);
  comm::Message await_message(Lock& lock, comm::RoundId round, const std::string& what);
  void await_event(const kernels::Event& event, const std::string& what);
  void await_mark(Lane& lane, const kernels::Mark& mark, const std::string& what);
  void await_devices(const std::string& what);
  void wait_until_resolved(Lock& lock);
  void resolve(Lock& lock);
  void report_failure(Lock& lock);
  /// `said`: what to say of it if ranks differ; empty: described.
  GateMerged agree(Lock& lock, const GateSay& words, const std::vector<std::string>& said = {});
  /// What a rank says that cannot go on because of `problem`.
  [[nodiscard]] static std::vector<std::string> refusal(const std::string& problem);
  void join_pass(Lock& lock, const GateMerged& gate, const std::optional<std::string>& error);
  [[noreturn]] void explain(Lock& lock, const std::string& error, bool windows_discarded);
  std::vector<std::string> gather_texts(Lock& lock,
                                        const std::string& text,
                                        const std::string& what);
  void abandon_own_pass();
  [[noreturn]] void time_out(const std::string& what, const std::vector<int>& missing);
  void complete_say(GateSay& say) const;
  [[nodiscard]] std::vector<std::string> describe(const GateSay& say) const;
  void clear_windows(const Bits& engines);
  /// Runs a collective call; what breaks it on this rank breaks the world.
  template <class Body>
  auto guarded(Body&& body);
  /// Under the lock.
  void break_world(const std::string& text) noexcept;

  // touches.cpp
  void run_empty_pass();

  // pass.cpp
  bool advance();
  bool take_rounds();
  void post_gate(const GateSay& say);
  void post_close(bool failed);
  void trace_pass(const char* name);
  void finish_pass(const CloseMerged& close);
  void launch_due();
  void launch(const Launch& launch);
  [[nodiscard]] EngineCore* live_core(std::int32_t serial) const;

  // arithmetic.cpp
  [[nodiscard]] std::string read_tokens();
  [[nodiscard]] std::vector<double> multipliers() const;
  void multiply_windows(const std::vector<double>& factors);
  void multiply_window(EngineCore& core, double factor);
  void set_loss_scale(double scale);
  void begin_scaling(GateSay& say);
  void move_loss_scale(const StepResult& result);

  // gradient.cpp
  at::Tensor gather_gradient(Lock& lock, const GateMerged& gate);

  // parameters.cpp
  std::string settle_parameters();
  static std::string settle(EngineCore& core);
  static std::string restore_moved(EngineCore& core);
  [[nodiscard]] std::string gradient_set_by_hand(const Bits& engines);
  void drop_gradients(const Bits& engines);
  [[noreturn]] void refuse_opening(Lock& lock, const std::string& problem);
  void warn_of_an_endless_window();

  // step.cpp
  std::string adopt_settings();
  StepResult perform_step(Lock& lock, const GateMerged& gate);
  struct Part;  // one engine's part of a step
  std::vector<Part> gather_parts(const GateMerged& gate) const;
  /// How the raw sum in an engine's accumulators becomes its averaged gradient.
  struct Averaging {
    double denominator = 0.0;  // 0: nothing was seen
    double multiplier = 1.0;
    double loss_scale = 1.0;
    /// `x` times multiplier / (denominator * loss scale): one quotient, so that whole numbers stay
    /// whole.
    [[nodiscard]] double scaled(double x) const {
      return x * multiplier / (denominator * loss_scale);
    }
  };
  [[nodiscard]] Averaging averaging(const EngineCore& core,
                                    const GateMerged& gate,
                                    double multiplier,
                                    const std::string& call) const;
  void wait_for_reductions(StepTimes& times);
  void trim();
  void update_and_gather(const GateMerged& gate, std::vector<Part>& parts, StepResult& result);
  void hand_parameters_to_torch();

  // joint_norm.cpp
  void joint_norm(Lock& lock, double p, std::vector<Part>& parts, StepResult& result);
  static void start_sums(double p, std::vector<Part>& parts);
  void share_largest(Lock& lock, std::vector<Part>& parts);
  void share_sums(Lock& lock, std::vector<Part>& parts);

  // module_buffers.cpp
  void exchange_buffers(EngineCore& core, const Bits& stepping);
  void average_buffers(EngineCore& core, const Bits& stepping);

  // registration.cpp
  Lane& lane_on(c10::Device device);
  [[nodiscard]] std::string objection_to(c10::Device device, const EngineOptions& options) const;
  void name_in_trace(const EngineCore& core);
  void drop_retired();
  void compare_values(Lock& lock, const EngineCore& core, const std::vector<at::Tensor>& tensors);
  void broadcast_values(EngineCore& core);
  /// False where the parameters lie in another rank's memory (share_parameters_on_node).
  [[nodiscard]] bool owns_parameter_memory(const EngineCore& core) const;
  [[nodiscard]] std::uint64_t world_hash() const;

  // world_state.cpp
  void progress();
  void watch();
  void finish_lanes() noexcept;

  const WorldOptions options_;
  const std::unique_ptr<comm::Rendezvous> rendezvous_;
  const comm::Group group_;
  const std::shared_ptr<Trace> trace_;
  std::unique_ptr<comm::ControlPlane> control_;
  const std::unique_ptr<Lanes> devices_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // one a device, in the order of their first engines
  // Folds during backward, gathers during the step: does them on the CPU, gives them to the lane's
  // stream on a device. Destroyed before the lanes.
  std::unique_ptr<kernels::Queue> queue_;

  mutable std::mutex mutex_;
  Sequencer sequencer_;
  std::vector<std::shared_ptr<EngineCore>>
      cores_;  // as in the sequencer's tables; retired ones too
  std::unordered_map<std::int32_t, int> index_of_;  // serial to index
  std::int32_t next_serial_ = 0;

  // the open pass
  comm::RoundId gate_round_ = 0;
  comm::RoundId close_round_ = 0;
  std::int64_t passes_ = 0;       // of this world, for messages
  std::int64_t pass_began_ = -1;  // for the trace; -1: not recording then
  std::uint64_t profiled_pass_ = 0;
  std::optional<std::string> gate_error_;  // of the open or the last pass; explained at a touch
  std::vector<std::string> said_;          // what this rank said last, for explanations
  std::exception_ptr failure_;             // to be thrown at the next touch
  std::atomic<bool> abandoned_{false};     // the open pass died

  int hold_depth_ = 0;
  std::vector<std::vector<std::int32_t>> only_;  // serials of each scope; the last one counts
  Average average_;
  std::optional<double> loss_scale_;  // none before the first scale()
  bool scale_called_ = false;         // since the last pass began
  bool scaling_began_ = false;        // with the open pass
  bool warned_unscaled_ = false;
  std::int64_t applied_since_scale_moved_ = 0;
  std::int64_t window_passes_ = 0;
  std::int64_t updates_ = 0;
  std::int64_t launches_ = 0;
  WireReport retired_wire_;  // of engines that are gone
  double busy_at_last_step_ = 0.0;
  bool warned_passed_over_ = false;
  bool windows_ever_cleared_ = false;  // by a step or zero_grad
  bool left_ = false;
  bool closed_ = false;
  std::optional<std::string> broken_;

  std::condition_variable progress_wanted_;
  int touching_ = 0;  // the user's thread takes rounds itself; the progress thread keeps out
  bool stopping_ = false;
  std::unique_ptr<hooks::PassTracker> tracker_;
  std::thread progress_;  // last: starts when everything above is there
};

/// What an EngineBase holds; its end takes the engine out of the world.
struct EngineState {
  std::shared_ptr<WorldState> world;
  std::shared_ptr<EngineCore> core;

  EngineState(std::shared_ptr<WorldState> w, std::shared_ptr<EngineCore> c)
      : world(std::move(w)), core(std::move(c)) {}
  ~EngineState() { world->retire_engine(*core); }
  EngineState(const EngineState&) = delete;
  EngineState& operator=(const EngineState&) = delete;
  EngineState(EngineState&&) = delete;
  EngineState& operator=(EngineState&&) = delete;
};

template <class Body>
auto WorldState::guarded(Body&& body) {
  check_usable();
  try {
    return body();
  } catch (const InvalidArgument&) {
    throw;  // refused before anything was said, or agreed by all ranks: nothing broke
  } catch (const Mismatch&) {
    throw;
  } catch (const BackwardFailed&) {
    throw;
  } catch (const kernels::DeviceError& error) {
    {
      const std::lock_guard lock(mutex_);
      break_world(error.what());
      if (*broken_ != error.what()) {
        throw WorldBroken(*broken_);  // what broke it before is the cause of this
      }
    }
    throw_public(error);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    break_world(error.what());
    throw;
  }
}

}  // namespace tandem::engine
