// comm/mark_wait.h: the host's waits for work on a device's stream: with a deadline, and ended at
// once when the world is aborted or the work has failed.
// Called by comm (staged channel) and engine (the step).
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "kernels/stream.h"

#include <functional>
#include <string>

namespace tandem::comm {

/// What a wait is for, for errors.
struct Awaited {
  std::string where;  // "engine 'critic'"
  std::string what;   // "bucket 3"
  Group group;
};

/// Blocks until `mark` is complete. `check` (a DataPlane's) is asked again and again, and once
/// more at the end: what an abort has ended has not been done. Throws Timeout, whatever `check`
/// throws, DeviceError.
void await_mark(const kernels::Mark& mark,
                const std::function<void()>& check,
                const Awaited& awaited,
                Deadline deadline);

/// "`where`: `what`: not finished by its deadline on rank 1; ...".
[[noreturn]] void time_out(const Awaited& awaited);

}  // namespace tandem::comm
