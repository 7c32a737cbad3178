// hooks/pass_state.h: which graph tasks belong to the open pass, which are refused, and when it
// ends.
//
// One object a tracker, shared by the tracker and, weakly, by every hook and every end of a graph
// task, so that tracker, leaves and graphs may die in any order.
//
// S1 A graph task is known from its first hook to its end or death: the end callback that it then
// owns
//    holds a TaskEnd, whose destructor tells. So what is kept about tasks never accumulates.
// S2 The sink is never called with mutex_ held: it may ask the tracker anything from inside an
// event.
// S3 Hooks on a GPU's tensors run on one of autograd's device threads, whoever called backward(),
//    and may still run when it has thrown. So such a thread tells nothing of whose pass it is, and
//    delivers_now() is asked where a gradient is taken.
// Called by pass_tracker.cpp and leaf_hooks.cpp only.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace tandem::hooks {

class PassSink;

/// Which thread a hook runs on: the one that called backward(), or autograd's for a device (S3).
enum class HookThread : std::uint8_t { kCallers, kDevices };

class PassState : public std::enable_shared_from_this<PassState> {
 public:
  enum class Verdict {
    kDeliver,  // the graph task belongs to the open pass
    kDrop,     // it was refused, or its pass is over without it
    kLeave,    // the tracker is gone
  };
  /// `sink` is set for kDeliver, and lives until left(), which is then called once.
  struct Entry {
    Verdict verdict;
    PassSink* sink;
  };
  /// Calls left() at the end of a hook.
  class Visit {
   public:
    Visit(PassState& state, const Entry& entry)
        : state_(entry.verdict == Verdict::kDeliver ? &state : nullptr) {}
    ~Visit() {
      if (state_ != nullptr) state_->left();
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    Visit(Visit&&) = delete;
    Visit& operator=(Visit&&) = delete;

   private:
    PassState* state_;
  };

  explicit PassState(PassSink& sink) : sink_(&sink) {}

  /// To be called by every hook, inside its graph task: opens a pass, joins the open one, or throws
  /// if the task is refused just now.
  Entry enter(HookThread thread);
  void disarm();
  /// From now on nothing calls the sink; waits for hooks on other threads that do (a device's,
  /// after the caller's thread has thrown).
  void leave_sink();

  [[nodiscard]] bool open() const;
  /// By this one, or by a device's thread, which may have worked for this one.
  [[nodiscard]] bool opened_by_this_thread() const;
  /// True if the graph task that the calling thread is in belongs to the open pass.
  [[nodiscard]] bool delivers_now() const;
  [[nodiscard]] std::size_t known_tasks() const;

 private:
  class TaskEnd;
  enum class State : std::uint8_t {
    kJoined,     // belongs to the open pass
    kRefused,    // its hooks only drop; what refused it was thrown
    kForgotten,  // its pass is over without it; its end says so, if nothing else has been thrown
  };
  struct Task {
    std::thread::id thread;  // of its first hook
    State state;
  };

  [[nodiscard]] bool find_entry(int task, Entry* entry);
  /// Under mutex_.
  void visit();
  void left();
  void open_pass(int task, PassSink& sink, HookThread thread);
  void task_ended(int task);
  void task_died(int task) noexcept;
  void forget_pass();

  std::mutex entering_;  // held while a graph task is admitted, opened() included
  mutable std::mutex mutex_;
  // Under mutex_:
  PassSink* sink_;
  std::unordered_map<int, Task> tasks_;
  std::size_t joined_ = 0;                                   // the pass is open while this is not 0
  std::size_t visiting_ = 0;                                 // hooks that call the sink just now
  std::unordered_map<std::thread::id, std::size_t> visits_;  // of them, on each thread
  std::condition_variable one_left_;
  std::thread::id opener_;
  HookThread opener_kind_ = HookThread::kCallers;
};

}  // namespace tandem::hooks
