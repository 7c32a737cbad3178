#include "comm/futex.h"

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tandem::comm {

namespace {

// Neither call carries FUTEX_PRIVATE_FLAG: the word may be mapped by several processes.
void futex_wait(std::atomic<std::uint32_t>& word,
                std::uint32_t seen,
                std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  timespec relative{};
  relative.tv_sec = seconds.count();
  relative.tv_nsec = (timeout - seconds).count();
  // EAGAIN, EINTR and ETIMEDOUT all mean that the caller looks again.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &relative, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace

void Bell::ring() {
  // Both orders are seq_cst, here and in sleep(): either this rank sees the sleeper, or the kernel,
  // which compares the word, sees the new count.
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(count_);
}

void Bell::sleep(std::uint32_t seen, Clock::time_point until) {
  const auto left = std::min<Clock::duration>(until - Clock::now(), kSleepSlice);
  if (left <= Clock::duration::zero()) return;
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(count_, seen, left);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

bool may_spin(int ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return false;
  return CPU_COUNT(&cores) > ranks;
}

void spin_once() {
  for (int i = 0; i < 32; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  }
}

}  // namespace tandem::comm
