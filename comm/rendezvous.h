// comm/rendezvous.h: how the ranks of one world find each other, show each other memory where they
// share a node, and get messengers where they do not.
//
// Blocking and collective, used when a world or an engine is made; never while training. Four
// implementations: processes over MPI or over a store, threads of one process, one rank alone.
//
// Thread safety: one thread a rank at a time.
// Called by comm (planes) and engine (World).
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "comm/mailbox_messenger.h"
#include "comm/messenger.h"
#include "comm/nodes.h"
#include "comm/segment.h"

#include <memory>
#include <string>
#include <vector>

namespace tandem::comm {

class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  [[nodiscard]] virtual Group group() const = 0;
  [[nodiscard]] virtual const Nodes& nodes() const = 0;
  /// Each rank's text, in rank order. Texts may differ in length. Throws Timeout (naming `what`).
  virtual std::vector<std::string> all_gather(const std::string& what,
                                              const std::string& text,
                                              Deadline deadline) = 0;
  /// Each rank's segment, in rank order, the caller's own being the one it gave; null for ranks of
  /// other nodes. Ranks in one process share the mapping itself. Throws Timeout, SystemError (the
  /// same on all ranks).
  virtual std::vector<std::shared_ptr<Segment>> exchange(const std::string& what,
                                                         std::shared_ptr<Segment> mine,
                                                         Deadline deadline) = 0;
  /// A messenger among all ranks, which the rendezvous outlives. Throws Timeout, SystemError.
  virtual std::unique_ptr<Messenger> make_messenger(const std::string& what, Deadline deadline) = 0;
  /// The orderly end; collective. After it MPI may be finalized at exit. Never called when a world
  /// is broken or unwinding: then the process ends without MPI_Finalize, which mpirun reports.
  virtual void close(Deadline deadline) = 0;
};

/// One rank, no peers.
std::unique_ptr<Rendezvous> make_self_rendezvous();

/// Test instruments of ranks that are threads.
struct ThreadNodes {
  int ranks_per_node = 0;              // see Nodes::consecutive
  std::vector<std::string> keys = {};  // if not empty, of each rank instead: see Nodes
  MessageDelays delays = {};           // of messages between nodes
};

/// `size` ranks, one for each thread of this process. Throws InvalidArgument.
std::vector<std::unique_ptr<Rendezvous>> make_thread_rendezvous(int size,
                                                                const ThreadNodes& nodes = {});

}  // namespace tandem::comm
