// comm/mpi_rendezvous.h: the rendezvous of processes started by mpirun or srun.
//
// R1 MPI is initialised with MPI_THREAD_MULTIPLE only if the program has not done so, and then
//    finalized at exit if every rendezvous of the process was closed in order.
// R2 Each rendezvous duplicates its own communicator, and one for each messenger. Apart from
// initialisation, no call blocks in
//    MPI: operations are started, tested and given up at their deadline. What was given up is left
//    as it is (its buffers too: a late peer may still write into them).
// R3 A rendezvous destroyed without close() communicates nothing.
// Called by engine (World::from_environment); built only with TANDEM_MPI=ON.
#pragma once

#include "comm/rendezvous.h"

#include <memory>

namespace tandem::comm {

/// Over MPI_COMM_WORLD; collective. Ranks of one host (one kernel, one numbering of processes)
/// share a node; `ranks_per_node` above 0 cuts hosts into nodes of that many consecutive ranks.
/// Throws SystemError (thread level), InvalidArgument (below 0), Timeout.
std::unique_ptr<Rendezvous> make_mpi_rendezvous(Deadline deadline, int ranks_per_node = 0);

/// True if the program initialised MPI itself, or an earlier world did.
[[nodiscard]] bool mpi_is_initialized();

}  // namespace tandem::comm
