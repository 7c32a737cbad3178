// comm/store_rendezvous.h: the rendezvous of processes that share a store instead of MPI.
//
// V1 Who belongs to a world is settled first: every rank sets a random word of its own, rank 0 sets
//    the list of all words, every rank that finds its word in the list confirms it, and rank 0
//    declares the list for final when all have. So the keys that worlds before this one, or
//    processes of an earlier attempt of the launcher, left in the store are never taken for this
//    world's, and two processes that claim one rank are found out.
// V2 All further keys carry the world's name, which is new each time.
// V3 A gathering goes through rank 0, which collects all texts into one value: each rank makes a
//    few calls, rank 0 a few for each rank. If ranks are missing at its deadline it says so in
//    that value, and all ranks throw the same.
// V4 Waiting is asking again after a pause that grows with the time waited (an eighth of it, 50 us
//    to 20 ms): nothing is held up at the server.
// Called by comm/launcher.
#pragma once

#include "comm/rendezvous.h"
#include "comm/store.h"
#include "comm/store_messenger.h"

#include <memory>
#include <string>

namespace tandem::comm {

struct StoreRanks {
  Group group;
  int ranks_per_node = 0;                      // as for make_mpi_rendezvous()
  std::string host_key = {};                   // test instrument: instead of the host's
  std::size_t chunk_bytes = kStoreChunkBytes;  // see StoreMail
};

/// Collective over all `ranks.group.size` processes. Throws Timeout (naming the ranks that did not
/// come), SystemError (the store failed; another process claims this rank), InvalidArgument.
std::unique_ptr<Rendezvous> make_store_rendezvous(std::shared_ptr<Store> store,
                                                  const StoreRanks& ranks,
                                                  Deadline deadline);

}  // namespace tandem::comm
