// kernels/queue.cpp: a queue on the CPU: one worker thread and a list of entries in their order.
//
// An entry is a job, a wait for another queue's event, or a mark that completes one of our events.
// No lock is held while a job runs or while the worker waits for an event, so jobs may enqueue
// anywhere. No cycle of waits can form: an event exists only once everything before it has been
// enqueued, and a wait comes after its event.
#include "kernels/queue.h"

#include "kernels/check.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace tandem::kernels {

struct Event::State {
  mutable std::mutex mutex;
  mutable std::condition_variable completed;
  bool complete = false;
  std::exception_ptr error;  // the queue's, if it failed at or before this point

  void set(std::exception_ptr queue_error) {
    {
      const std::lock_guard lock(mutex);
      complete = true;
      error = std::move(queue_error);
    }
    completed.notify_all();
  }

  void rethrow_if_failed() const {
    if (error) std::rethrow_exception(error);
  }

  /// For the workers: their jobs have deadlines, so every event is complete some day (Q4).
  void wait() const {
    std::unique_lock lock(mutex);
    completed.wait(lock, [&] { return complete; });
    rethrow_if_failed();
  }
};

bool Event::complete() const {
  if (state_ == nullptr) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->complete;
}

bool Event::wait_until(std::chrono::steady_clock::time_point until) const {
  if (state_ == nullptr) return true;
  std::unique_lock lock(state_->mutex);
  if (!state_->completed.wait_until(lock, until, [&] { return state_->complete; })) return false;
  state_->rethrow_if_failed();
  return true;
}

namespace {

/// splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

void pause_before(std::uint64_t job_number, const QueueDelays& delays) {
  if (delays.max_us <= 0) return;
  const std::uint64_t random = mix(delays.seed ^ mix(job_number));
  const auto limit = static_cast<std::uint64_t>(delays.max_us) + 1;
  std::this_thread::sleep_for(std::chrono::microseconds(static_cast<std::int64_t>(random % limit)));
}

void name_this_thread(const std::string& name) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());  // 15 is the kernel's limit
#else
  static_cast<void>(name);
#endif
}

}  // namespace

struct Queue::Impl {
  enum class Kind : std::uint8_t { kJob, kWait, kMark };
  struct Entry {
    Kind kind = Kind::kJob;
    std::function<void()> job;            // kJob
    std::shared_ptr<Event::State> state;  // kWait: another queue's; kMark: ours
  };

  std::string name;
  QueueDelays delays;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<Entry> entries;
  bool running = false;  // the worker has taken an entry and not finished it
  bool closing = false;
  std::exception_ptr error;
  std::chrono::steady_clock::duration busy{};

  std::thread worker;  // last: it uses everything above

  void push(Entry entry) {
    {
      const std::lock_guard lock(mutex);
      entries.push_back(std::move(entry));
    }
    changed.notify_one();
  }

  void run() {
    name_this_thread(name);
    std::uint64_t job_number = 0;
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return closing || !entries.empty(); });
      if (entries.empty()) return;
      Entry entry = std::move(entries.front());
      entries.pop_front();
      running = true;
      if (entry.kind == Kind::kJob) ++job_number;  // skipped ones too: pauses stay reproducible
      const std::exception_ptr failed = error;
      lock.unlock();

      std::exception_ptr thrown;
      std::chrono::steady_clock::duration spent{};
      if (entry.kind == Kind::kMark) {
        entry.state->set(failed);
      } else if (!failed) {
        if (entry.kind == Kind::kJob) pause_before(job_number, delays);
        const auto start = std::chrono::steady_clock::now();
        try {
          entry.kind == Kind::kJob ? entry.job() : entry.state->wait();
        } catch (...) {
          thrown = std::current_exception();
        }
        if (entry.kind == Kind::kJob) spent = std::chrono::steady_clock::now() - start;
      }
      // What the job held is released before a later event says that it is over, and without the
      // lock: a destructor may enqueue.
      entry = Entry{};

      lock.lock();
      running = false;
      busy += spent;
      if (thrown) error = thrown;
    }
  }
};

Queue::Queue(std::string name, QueueDelays delays) : impl_(std::make_unique<Impl>()) {
  impl_->name = std::move(name);
  impl_->delays = delays;
  impl_->worker = std::thread([impl = impl_.get()] { impl->run(); });
}

Queue::~Queue() {
  TANDEM_ASSERT(impl_->worker.get_id() != std::this_thread::get_id(),
                "a queue is not destroyed by one of its own jobs");
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
  }
  impl_->changed.notify_one();
  impl_->worker.join();
}

void Queue::enqueue(std::function<void()> job) {
  impl_->push({.kind = Impl::Kind::kJob, .job = std::move(job), .state = nullptr});
}

Event Queue::record() {
  Event event;
  event.state_ = std::make_shared<Event::State>();
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->entries.empty() && !impl_->running) {
      // Nobody else knows the state yet: no lock of its own.
      event.state_->complete = true;
      event.state_->error = impl_->error;
      return event;
    }
    impl_->entries.push_back({.kind = Impl::Kind::kMark, .job = nullptr, .state = event.state_});
  }
  impl_->changed.notify_one();
  return event;
}

void Queue::wait(const Event& event) {
  if (event.state_ == nullptr) return;
  impl_->push({.kind = Impl::Kind::kWait, .job = nullptr, .state = event.state_});
}

double Queue::busy_seconds() const {
  const std::lock_guard lock(impl_->mutex);
  return std::chrono::duration<double>(impl_->busy).count();
}

std::exception_ptr Queue::error() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->error;
}

}  // namespace tandem::kernels
