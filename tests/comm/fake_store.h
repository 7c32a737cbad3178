// tests/comm/fake_store.h: the store of ranks that are threads: a table under a mutex.
#pragma once

#include "comm/store.h"
#include <tandem/error.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace tandem::comm {

class FakeStore final : public Store {
 public:
  /// Every call takes 0..max_us.
  explicit FakeStore(int max_us = 0) : pause_(0, max_us) {}

  void set(const std::string& key, const std::string& value) override {
    const auto lock = call();
    if (value.size() > kLongestStoreValue) throw SystemError("a value too long for the store");
    values_[key] = value;
  }
  [[nodiscard]] std::optional<std::string> find(const std::string& key) override {
    const auto lock = call();
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const auto lock = call();
    std::string& value = values_[key];
    const std::int64_t sum = (value.empty() ? 0 : std::stoll(value)) + amount;
    value = std::to_string(sum);
    return sum;
  }
  void erase(const std::string& key) override {
    const auto lock = call();
    values_.erase(key);
  }

  /// The server dies.
  void break_now() { broken_ = true; }

  [[nodiscard]] std::map<std::string, std::string> values() const {
    const std::lock_guard lock(mutex_);
    return values_;
  }

 private:
  std::unique_lock<std::mutex> call() {
    std::unique_lock lock(mutex_);
    const int us = pause_.max() == 0 ? 0 : pause_(random_);
    if (us > 0) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(us));
      lock.lock();
    }
    if (broken_) throw SystemError("the fake store does not answer; start it again");
    return lock;
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::mt19937 random_;
  std::uniform_int_distribution<int> pause_;
  std::atomic<bool> broken_{false};
};

}  // namespace tandem::comm
