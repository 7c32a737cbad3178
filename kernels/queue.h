// kernels/queue.h: where work is ordered. On the CPU a queue is one worker thread; on a GPU it
// will be a stream. Events join queues with each other and with the host.
//
// Q1 Jobs of one queue run one after another in the order in which they were enqueued.
// Q2 An event recorded after a job is complete only when that job is.
// Q3 A job that throws fails its queue: later jobs are skipped, their events complete, and every
//    later wait_until() rethrows the first error. A queue that waits for an event of a failed queue
//    fails with the same error, at that place. Nothing is lost silently, nobody waits for ever.
// Q4 Destruction runs what was enqueued to the end (jobs have their own deadlines), then joins.
// Thread safety: every member may be called from any thread; order among several enqueuing
// threads is theirs to keep.
// Called by comm (reductions, gathers) and engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace tandem::kernels {

class Queue;

/// A point in a queue. Copies share the point; an empty event is complete.
class Event {
 public:
  Event() = default;
  [[nodiscard]] bool complete() const;
  /// Blocks the host; rethrows the queue's error if it failed at or before this point. False when
  /// `until` passes first.
  [[nodiscard]] bool wait_until(std::chrono::steady_clock::time_point until) const;

 private:
  friend class Queue;
  struct State;
  std::shared_ptr<State> state_;
};

/// Test instrument: every job is preceded by a pseudo-random pause of 0..max_us, keyed by seed and
/// the job's number, so that a missing wait shows as wrong bits on the CPU.
struct QueueDelays {
  std::uint64_t seed = 0;
  std::int64_t max_us = 0;  // 0: no delays
};

class Queue {
 public:
  explicit Queue(std::string name, QueueDelays delays = {});
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  Queue(Queue&&) = delete;
  Queue& operator=(Queue&&) = delete;

  /// The job and what it holds are destroyed before an event recorded after it is complete. Jobs
  /// may enqueue, record and wait on any queue, their own included; they do not destroy their own.
  void enqueue(std::function<void()> job);
  /// The point after everything enqueued so far.
  [[nodiscard]] Event record();
  /// Later jobs of this queue start only after `event` (of another queue) is complete.
  void wait(const Event& event);
  /// Seconds in which jobs ran since construction (pauses of QueueDelays not counted).
  [[nodiscard]] double busy_seconds() const;
  /// Null, or the error of the job that failed this queue.
  [[nodiscard]] std::exception_ptr error() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::kernels
