#include "comm/mark_wait.h"

#include <tandem/error.h>

#include <algorithm>

namespace tandem::comm {

void await_mark(const kernels::Mark& mark,
                const std::function<void()>& check,
                const Awaited& awaited,
                Deadline deadline) {
  constexpr std::chrono::milliseconds kBetweenChecks{1};
  while (!mark.wait_until(std::min(deadline.at, Clock::now() + kBetweenChecks))) {
    check();
    if (deadline.passed()) time_out(awaited);
  }
  check();
}

void time_out(const Awaited& awaited) {
  throw Timeout(awaited.where + ": " + awaited.what + ": not finished by its deadline on rank " +
                std::to_string(awaited.group.rank) + " of " + std::to_string(awaited.group.size) +
                "; if the device or a peer is only slow, use a longer timeout, else restart from "
                "the last checkpoint");
}

}  // namespace tandem::comm
