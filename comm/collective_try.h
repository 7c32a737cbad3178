// comm/collective_try.h: something that every rank tries and that may fail on some, with one
// outcome for all.
// Called by comm (planes).
#pragma once

#include "comm/rendezvous.h"

#include <functional>
#include <string>

namespace tandem::comm {

/// Runs `attempt` on every rank. If it threw a tandem::Error or DeviceError on any of them, every
/// rank throws the first failing rank's, of the same type, saying which rank it was; a rank that
/// only waited in vain (Timeout) comes last, and OutOfDeviceMemory becomes OutOfMemory. `agreed`
/// must be the same text on all ranks, else all of them throw Mismatch. Collective; throws Timeout.
void try_on_all_ranks(Rendezvous& rendezvous,
                      const std::string& what,
                      const std::string& agreed,
                      Deadline deadline,
                      const std::function<void()>& attempt);

}  // namespace tandem::comm
