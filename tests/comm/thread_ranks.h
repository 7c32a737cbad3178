// Ranks as threads of one process, for the tests of comm.
#pragma once

#include "comm/rendezvous.h"

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace tandem::comm {

/// Long enough for a loaded machine; no test that passes waits for it.
inline Deadline patient() { return Deadline::after(std::chrono::seconds(60)); }
inline Deadline soon() { return Deadline::after(std::chrono::milliseconds(150)); }

/// Runs `body` once a rank, each in its own thread; what escapes fails the test with its rank.
inline void on_thread_ranks(int size, const std::function<void(Rendezvous&)>& body) {
  auto ranks = make_thread_rendezvous(size);
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*ranks[static_cast<std::size_t>(rank)]);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)], "") << "on rank " << rank << " of " << size;
  }
}

/// Pauses of 0..max_us, different on each rank, so that every rank is sometimes the slow one.
class Pauses {
 public:
  Pauses(int rank, int max_us) : random_(static_cast<unsigned>(rank) + 1), pause_(0, max_us) {}
  void operator()() {
    const int us = pause_(random_);
    if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

 private:
  std::mt19937 random_;
  std::uniform_int_distribution<int> pause_;
};

}  // namespace tandem::comm
