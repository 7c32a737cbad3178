// comm/rendezvous.h: how the ranks of one world find each other and show each other memory.
//
// Blocking and collective, used when a world or an engine is made; never while training. Three
// implementations: MPI processes, threads of one process, and one rank alone.
//
// Thread safety: one thread a rank at a time.
// Called by comm (planes) and engine (World).
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "comm/segment.h"

#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  [[nodiscard]] virtual Group group() const = 0;
  /// Each rank's text, in rank order. Texts may differ in length. Throws Timeout (naming `what`).
  virtual std::vector<std::string> all_gather(const std::string& what,
                                              const std::string& text,
                                              Deadline deadline) = 0;
  /// Each rank's segment, in rank order, the caller's own being the one it gave. Ranks in one
  /// process share the mapping itself. Throws Timeout, SystemError (the same on all ranks).
  virtual std::vector<std::shared_ptr<Segment>> exchange(const std::string& what,
                                                         std::shared_ptr<Segment> mine,
                                                         Deadline deadline) = 0;
  /// The orderly end; collective. After it MPI may be finalized at exit. Never called when a world
  /// is broken or unwinding: then the process ends without MPI_Finalize, which mpirun reports.
  virtual void close(Deadline deadline) = 0;
};

/// One rank, no peers.
std::unique_ptr<Rendezvous> make_self_rendezvous();
/// `size` ranks, one for each thread of this process.
std::vector<std::unique_ptr<Rendezvous>> make_thread_rendezvous(int size);

}  // namespace tandem::comm
