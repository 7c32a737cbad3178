// engine/tcp_store.h: comm's Store over LibTorch's c10d::TCPStore, as torchrun and PyTorch use it.
//
// 1. Rank 0's process hosts the server at MASTER_ADDR:MASTER_PORT, unless torchrun's agent does.
//    The address is one for a process, and so is the connection: it is made by the first world,
//    serves the later ones, and ends with the process (a server that ended with one world would
//    take those with it that join the next).
// 2. TCPStore's calls wait for their answer without limit. They are made by a thread that can be
//    left behind, and a call that is not answered in kAnswer is a SystemError.
// 3. Only operations that every server since PyTorch 2.0 knows: the agent may be of another
// release. Called by engine/world.
#pragma once

#include "comm/launcher.h"
#include "comm/store.h"

#include <memory>

namespace tandem::engine {

/// Connects, or returns this process's connection to the same address. Throws Timeout when there
/// is no server by the deadline (rank 0 did not come), SystemError when rank 0 cannot make one.
std::shared_ptr<comm::Store> open_tcp_store(const comm::StoreLaunch& launch,
                                            comm::Deadline deadline);

}  // namespace tandem::engine
