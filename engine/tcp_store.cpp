#include "engine/tcp_store.h"

#include <tandem/error.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace tandem::engine {

namespace {

using namespace std::chrono_literals;

constexpr auto kAnswer = 30s;
// No value of ours: compareSet() with it reads a key in one trip, and says it when there is none.
const std::string kNothing = "tandem: nothing under this key";

/// The first line of what LibTorch says; the rest is a stack.
std::string words_of(const std::exception& error) {
  const auto* const theirs = dynamic_cast<const c10::Error*>(&error);
  const std::string text = theirs != nullptr ? theirs->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

/// A thread that makes one call at a time for somebody who waits no longer than a deadline.
class Caller {
 public:
  Caller() : state_(std::make_shared<State>()), thread_([state = state_] { run(*state); }) {}

  ~Caller() {
    bool busy = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stopping = true;
      busy = state_->busy;
    }
    state_->changed.notify_all();
    if (busy) {
      thread_.detach();  // in a call that may never end; what it uses is its own
    } else {
      thread_.join();
    }
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  Caller(Caller&&) = delete;
  Caller& operator=(Caller&&) = delete;

  /// False when `call` is not through by the deadline: it goes on, and no other may be made. It
  /// must own what it uses. Throws what it throws.
  [[nodiscard]] bool make(std::function<void()> call, comm::Deadline deadline) {
    std::unique_lock lock(state_->mutex);
    state_->call = std::move(call);
    state_->busy = true;
    state_->error = nullptr;
    state_->changed.notify_all();
    if (!state_->changed.wait_until(lock, deadline.at, [&] { return !state_->busy; })) return false;
    if (state_->error) std::rethrow_exception(std::exchange(state_->error, nullptr));
    return true;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> call;
    std::exception_ptr error;
    bool busy = false;
    bool stopping = false;
  };

  static void run(State& state) {
    std::unique_lock lock(state.mutex);
    for (;;) {
      state.changed.wait(lock, [&] { return state.stopping || state.call; });
      if (!state.call) return;
      const auto call = std::exchange(state.call, nullptr);
      lock.unlock();
      std::exception_ptr error;
      try {
        call();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      state.error = std::move(error);
      state.busy = false;
      state.changed.notify_all();
    }
  }

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

class TcpStore final : public comm::Store {
 public:
  TcpStore(const comm::StoreLaunch& launch, comm::Deadline deadline)
      : where_(launch.host + ":" + std::to_string(launch.port)),
        hosts_(launch.rank == 0 && !launch.agent_hosts),
        server_(launch.agent_hosts ? "torchrun's agent" : "the process of rank 0") {
    connect(launch, deadline);
  }

  void set(const std::string& key, const std::string& value) override {
    ask<bool>([key, bytes = bytes_of(value)](c10d::TCPStore& store) {
      store.set(key, bytes);
      return true;
    });
  }

  [[nodiscard]] std::optional<std::string> find(const std::string& key) override {
    auto value = ask<std::string>([key](c10d::TCPStore& store) {
      const auto nothing = bytes_of(kNothing);
      const auto bytes = store.compareSet(key, nothing, nothing);
      return std::string(bytes.begin(), bytes.end());
    });
    return value == kNothing ? std::nullopt : std::optional(std::move(value));
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override {
    return ask<std::int64_t>(
        [key, amount](c10d::TCPStore& store) { return store.add(key, amount); });
  }

  void erase(const std::string& key) override {
    ask<bool>([key](c10d::TCPStore& store) { return store.deleteKey(key); });
  }

  [[nodiscard]] bool failed() const {
    const std::lock_guard lock(mutex_);
    return failure_.has_value();
  }

 private:
  static std::vector<std::uint8_t> bytes_of(const std::string& text) {
    return {text.begin(), text.end()};
  }

  void connect(const comm::StoreLaunch& launch, comm::Deadline deadline) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(launch.port);
    options.isServer = hosts_;
    options.waitWorkers = false;
    options.multiTenant = true;  // the program may have a server of its own there
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline.at - comm::Clock::now());
    options.timeout = std::max<std::chrono::milliseconds>(left, 1s);
    const std::string at = "MASTER_ADDR:MASTER_PORT (" + where_ + ")";
    try {
      const auto made = std::make_shared<c10::intrusive_ptr<c10d::TCPStore>>();
      const bool in_time = caller_.make(
          [made, options, host = launch.host] {
            *made = c10::make_intrusive<c10d::TCPStore>(host, options);
          },
          comm::Deadline{deadline.at + 2s});
      if (in_time) {
        store_ = *made;
        return;
      }
    } catch (const std::exception& error) {
      if (hosts_) {
        throw SystemError("rank 0 cannot make the store of this launch at " + at + ": " +
                          words_of(error) +
                          "; is that an address of this host, and is the port free?");
      }
      if (!deadline.passed() && dynamic_cast<const c10::DistNetworkError*>(&error) == nullptr) {
        throw SystemError("the store at " + at + " refuses rank " + std::to_string(launch.rank) +
                          ": " + words_of(error) + "; does anything else listen there?");
      }
    }
    // The same on all ranks.
    const std::string who = launch.agent_hosts ? "nobody answers" : "rank 0 did not come";
    throw Timeout("making the world of " + std::to_string(launch.size) + " ranks: " + who +
                  " by the deadline: there is no store at " + at + ", which " + server_ +
                  " keeps; was it started, and do all ranks have the same MASTER_ADDR and "
                  "MASTER_PORT?");
  }

  template <class Answer>
  Answer ask(std::function<Answer(c10d::TCPStore&)> question) {
    const std::lock_guard lock(mutex_);
    if (failure_) throw SystemError(*failure_);
    const auto answer = std::make_shared<Answer>();
    std::string why = "it has not answered for " + std::to_string(kAnswer.count()) + " s";
    try {
      if (caller_.make([answer, store = store_,
                        question = std::move(question)] { *answer = question(*store); },
                       comm::Deadline::after(kAnswer))) {
        return std::move(*answer);
      }
    } catch (const std::exception& error) {
      why = words_of(error);
    }
    failure_ = "the store at " + where_ + " has failed: " + why + "; " + server_ +
               " keeps it: look there for the cause, and start all ranks again";
    throw SystemError(*failure_);
  }

  const std::string where_;
  const bool hosts_;
  const std::string server_;
  mutable std::mutex mutex_;  // one call at a time
  std::optional<std::string> failure_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
  Caller caller_;
};

/// See 1.
struct ProcessStores {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<TcpStore>> by_address;
};

ProcessStores& process_stores() {
  static ProcessStores stores;
  return stores;
}

}  // namespace

std::shared_ptr<comm::Store> open_tcp_store(const comm::StoreLaunch& launch,
                                            comm::Deadline deadline) {
  ProcessStores& stores = process_stores();
  const std::lock_guard lock(stores.mutex);
  std::shared_ptr<TcpStore>& store =
      stores.by_address[launch.host + ":" + std::to_string(launch.port)];
  if (!store || store->failed()) {
    store.reset();  // before its successor, which may be the server
    store = std::make_shared<TcpStore>(launch, deadline);
  }
  return store;
}

}  // namespace tandem::engine
