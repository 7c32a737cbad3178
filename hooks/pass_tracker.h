// hooks/pass_tracker.h: turns LibTorch's backward passes into events: opened, reached, arrived,
// closed, abandoned.
//
// Words. A graph task is one run of the autograd engine. It joins the open pass at its first hook
// of ours, or opens one; it then owns an end callback. A pass ends with the last graph task that
// joined it. Nested graph tasks join; a graph task of another thread while a pass is open is
// refused.
//
// H1 opened() comes once a pass, before anything else of it; exactly one of closed(), abandoned()
//    and disarm() ends it.
// H2 Every gradient of an attached leaf is either handed to arrived() once or dropped; `.grad` of
//    the leaf is undefined afterwards, whatever happens: also when a sink throws, when a graph task
//    was refused and when its pass was abandoned.
// H3 abandoned() is noted from the destructor of what the graph task owned, on any thread; the sink
//    must only mark. After disarm() it is not called for the current pass any more.
// Thread safety: hooks run on the threads of the graph task (the caller's for the CPU, autograd's
// for each device, side by side); attach and detach on the user's. Knows nothing of ranks, buckets
// or optimizers. Called by engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace tandem::hooks {

class PassState;

/// What the engine room does with the events; none may run a backward pass itself. Tags are the
/// caller's (engine, parameter).
class PassSink {
 public:
  virtual ~PassSink() = default;
  /// The first hook of a graph task while no pass is open. A throw refuses the graph task: it
  /// reaches the caller of backward(), no pass is open, and the task's other hooks only drop their
  /// gradients.
  virtual void opened() = 0;
  /// The gradient of a tracked output of `engine` is about to be used. Any number of times a pass.
  virtual void reached(std::int32_t engine) = 0;
  /// The gradient of a leaf, taken over from autograd (detached). A throw reaches the caller of
  /// backward().
  virtual void arrived(std::int32_t engine, std::int32_t parameter, at::Tensor gradient) = 0;
  /// The last joined graph task has ended; runs on its thread, after all its leaf hooks. May throw.
  virtual void closed() = 0;
  /// A joined graph task died without its end. Any thread; no blocking, no throwing.
  virtual void abandoned() noexcept = 0;
};

class PassTracker;

/// Hooks on the leaves of one engine; destruction takes them off and restores what was there
/// before.
class LeafHooks {
 public:
  ~LeafHooks();
  LeafHooks(const LeafHooks&) = delete;
  LeafHooks& operator=(const LeafHooks&) = delete;
  LeafHooks(LeafHooks&&) = delete;
  LeafHooks& operator=(LeafHooks&&) = delete;

  /// Index of the first leaf whose hook slot is no longer ours, or -1.
  [[nodiscard]] std::int32_t first_displaced() const;
  /// Puts our hooks back where they were displaced, chaining the new occupants: they run first and
  /// find `.grad` in place. Returns the leaves whose gradients went past us meanwhile, into
  /// `.grad`, which is reset: nobody knows which pass they belong to.
  std::vector<std::int32_t> reattach();
  /// True if any leaf has a `.grad`.
  [[nodiscard]] bool any_gradient() const;
  /// Index of the first leaf with a `.grad` that is not all zeros, or -1: no pass left it there
  /// (H2), so somebody set it by hand.
  [[nodiscard]] std::int32_t first_with_gradient() const;
  /// Resets `.grad` of every leaf.
  void drop_gradients();

 private:
  friend class PassTracker;
  struct Impl;
  explicit LeafHooks(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// One a world.
class PassTracker {
 public:
  /// `sink` outlives the tracker. Hooks that fire after the tracker's death do nothing but leave
  /// gradients to autograd as if they were not there. It must not die while a backward pass runs on
  /// another thread.
  explicit PassTracker(PassSink& sink);
  ~PassTracker();
  PassTracker(const PassTracker&) = delete;
  PassTracker& operator=(const PassTracker&) = delete;
  PassTracker(PassTracker&&) = delete;
  PassTracker& operator=(PassTracker&&) = delete;

  /// Puts a post-accumulate hook on every leaf (one slot a tensor: the previous occupant is chained
  /// and runs first). Leaf i reports as parameter i. Resets `.grad`. `owner` is what taken_by()
  /// tells other trackers.
  [[nodiscard]] std::unique_ptr<LeafHooks> attach_leaves(std::int32_t engine,
                                                         const std::vector<at::Tensor>& leaves,
                                                         const std::string& owner = {});
  /// The owner of a hook that another tracker, still alive, has on `tensor`.
  [[nodiscard]] std::optional<std::string> taken_by(const at::Tensor& tensor) const;
  /// Puts a pre-hook on an output that requires grad; no effect on one that does not, nor on a
  /// leaf: a parameter's own hook tells, and on any other the hook would outlive the graph. The
  /// hook goes with the graph.
  void track_output(std::int32_t engine, const at::Tensor& output);

  /// What the pre-hook of a tracked output of `engine` does, for code of the user's that runs
  /// inside a graph task: joins it and reports reached().
  void reach(std::int32_t engine);

  /// True on a thread that is inside a graph task now (of anybody).
  [[nodiscard]] static bool inside_graph_task();
  [[nodiscard]] bool pass_open() const;
  /// True if the open pass was opened by the calling thread, or for anybody by one of autograd's
  /// device threads.
  [[nodiscard]] bool opened_by_this_thread() const;
  /// To be asked in arrived(), under the lock that disarm() is called under: false if the pass has
  /// meanwhile ended without this hook's graph task, as may happen on a device's thread.
  [[nodiscard]] bool delivers_now() const;
  /// Forgets the open pass without an event: its end is known otherwise. What its graph tasks still
  /// deliver is dropped, and their ends throw BackwardFailed, so that nobody takes them for passes.
  void disarm();
  /// Graph tasks in which a hook has fired and that neither ended nor died. 0 outside backward
  /// passes: nothing accumulates.
  [[nodiscard]] std::size_t known_tasks() const;

 private:
  std::shared_ptr<PassState> state_;
};

}  // namespace tandem::hooks
