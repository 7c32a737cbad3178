// hooks/pass_state.cpp: admission and end of graph tasks.
#include "hooks/pass_state.h"

#include "hooks/pass_tracker.h"
#include <tandem/error.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>
#include <utility>

namespace tandem::hooks {
namespace {

constexpr const char* kRefusedForThread =
    "a backward pass was started on a second thread while another thread's pass is open in the "
    "same world; its gradients are dropped. Run the backward passes of one world one after "
    "another, or "
    "give each thread a world of its own";

constexpr const char* kRefusedInsideFailed =
    "a backward pass was started inside one that has already failed; its gradients are dropped. "
    "Let the first exception leave the outer backward(), then repeat the pass";

}  // namespace

// Owned by the end callback of one graph task, thus by the graph task: if that dies without running
// the callback (a throw somewhere in it), only this destructor tells.
class PassState::TaskEnd {
 public:
  TaskEnd(std::weak_ptr<PassState> state, int task) : state_(std::move(state)), task_(task) {}
  ~TaskEnd() {
    if (ended_) return;
    if (const std::shared_ptr<PassState> state = state_.lock()) state->task_died(task_);
  }
  TaskEnd(const TaskEnd&) = delete;
  TaskEnd& operator=(const TaskEnd&) = delete;
  TaskEnd(TaskEnd&&) = delete;
  TaskEnd& operator=(TaskEnd&&) = delete;

  void run() {
    ended_ = true;  // before closed(), which may throw
    if (const std::shared_ptr<PassState> state = state_.lock()) state->task_ended(task_);
  }

 private:
  std::weak_ptr<PassState> state_;
  int task_;
  bool ended_ = false;
};

PassState::Entry PassState::enter(HookThread thread) {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    throw InvalidArgument(
        "a gradient of an engine's parameter was accumulated outside any backward pass; it is "
        "dropped. Use backward()");
  }
  Entry entry{};
  if (find_entry(task, &entry)) return entry;

  // A graph task may have hooks on several threads (one a device). Those that come while the first
  // one is in opened() wait here, then find the task known.
  const std::lock_guard<std::mutex> entering(entering_);
  if (find_entry(task, &entry)) return entry;

  // First of all, so that whatever becomes of the task, its record goes with it. No lock is held
  // here: if the engine cannot take the callback, TaskEnd dies at once.
  auto end = std::make_shared<TaskEnd>(weak_from_this(), task);
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });

  const std::thread::id me = std::this_thread::get_id();
  PassSink* sink = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (sink_ == nullptr) return {Verdict::kLeave, nullptr};
    if (joined_ != 0) {
      const bool nested =
          opener_ == me || opener_kind_ == HookThread::kDevices || thread == HookThread::kDevices;
      tasks_.emplace(task, Task{me, nested ? State::kJoined : State::kRefused});
      if (!nested) throw InvalidArgument(kRefusedForThread);
      ++joined_;
      visit();
      return {Verdict::kDeliver, sink_};
    }
    // A thread that still is inside a refused or failed graph task can only start nested ones.
    // Taking those for new passes would count half a pass. (A device's thread may have begun the
    // next pass already: it does not wait for what has failed to die.)
    for (const auto& [id, known] : tasks_) {
      if (thread == HookThread::kCallers && known.thread == me) {
        tasks_.emplace(task, Task{me, State::kRefused});
        throw BackwardFailed(kRefusedInsideFailed);
      }
    }
    sink = sink_;
    visit();
  }
  try {
    open_pass(task, *sink, thread);
  } catch (...) {
    left();
    throw;
  }
  return {Verdict::kDeliver, sink};
}

void PassState::visit() {
  ++visiting_;
  ++visits_[std::this_thread::get_id()];
}

void PassState::left() {
  bool wanted = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --visiting_;
    --visits_[std::this_thread::get_id()];
    wanted = sink_ == nullptr;
  }
  if (wanted) one_left_.notify_all();
}

bool PassState::find_entry(int task, Entry* entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (sink_ == nullptr) {
    *entry = {Verdict::kLeave, nullptr};
    return true;
  }
  const auto found = tasks_.find(task);
  if (found == tasks_.end()) return false;
  if (found->second.state != State::kJoined) {
    *entry = {Verdict::kDrop, nullptr};
    return true;
  }
  visit();
  *entry = {Verdict::kDeliver, sink_};
  return true;
}

void PassState::open_pass(int task, PassSink& sink, HookThread thread) {
  const std::thread::id me = std::this_thread::get_id();
  try {
    sink.opened();
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.emplace(task, Task{me, State::kRefused});
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.emplace(task, Task{me, State::kJoined});
  joined_ = 1;
  opener_ = me;
  opener_kind_ = thread;
}

void PassState::task_ended(int task) {
  PassSink* sink = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tasks_.find(task);
    if (found == tasks_.end()) return;
    const State state = found->second.state;
    tasks_.erase(found);
    if (state == State::kForgotten && sink_ != nullptr) {
      // Whoever swallowed the exception of a nested backward() must not go on as if this one had
      // worked.
      throw BackwardFailed(
          "this backward pass had already failed, probably in a nested backward() whose exception "
          "was caught inside it; its gradients were dropped. Repeat the pass");
    }
    if (state != State::kJoined || --joined_ != 0) return;
    sink = sink_;
    if (sink == nullptr) return;
    visit();
  }
  // The pass is over before the sink hears of it: a throw in closed() leaves none open.
  const Visit visit(*this, {Verdict::kDeliver, sink});
  sink->closed();
}

void PassState::task_died(int task) noexcept {
  PassSink* sink = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tasks_.find(task);
    if (found == tasks_.end()) return;
    const bool joined = found->second.state == State::kJoined;
    tasks_.erase(found);
    if (!joined) return;
    forget_pass();
    sink = sink_;
    if (sink == nullptr) return;
    visit();
  }
  const Visit visit(*this, {Verdict::kDeliver, sink});
  sink->abandoned();
}

void PassState::disarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_pass();
}

void PassState::leave_sink() {
  std::unique_lock<std::mutex> lock(mutex_);
  sink_ = nullptr;
  const std::size_t own = visits_[std::this_thread::get_id()];
  one_left_.wait(lock, [&] { return visiting_ == own; });
}

// Under mutex_. The tasks stay known, as tasks whose hooks drop, until they die or end.
void PassState::forget_pass() {
  for (auto& [id, known] : tasks_) {
    if (known.state == State::kJoined) known.state = State::kForgotten;
  }
  joined_ = 0;
}

bool PassState::open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return joined_ != 0;
}

bool PassState::opened_by_this_thread() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return joined_ != 0 &&
         (opener_ == std::this_thread::get_id() || opener_kind_ == HookThread::kDevices);
}

bool PassState::delivers_now() const {
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = tasks_.find(task);
  return found != tasks_.end() && found->second.state == State::kJoined;
}

std::size_t PassState::known_tasks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.size();
}

}  // namespace tandem::hooks
