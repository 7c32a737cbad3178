// comm/launcher.h: what the environment says about how this process was started.
//
// What started this very process decides: torchrun (TORCHELASTIC_RUN_ID) over a store, then mpirun,
// mpiexec or an MPI-aware srun (OMPI_*, PMI_*, PMIX_*) or a program that initialised MPI over MPI,
// then MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE over a store (srun's SLURM_PROCID and
// SLURM_NTASKS stand in for the last two), then srun alone over MPI. Otherwise it is one rank. A
// build without MPI knows the store only.
//
// N silent worlds of one are worse than an error: a launcher that says more ranks than MPI has
// (SLURM_NTASKS, PMI_SIZE, OMPI_COMM_WORLD_SIZE, or WORLD_SIZE without MASTER_ADDR, above 1) is
// refused, so is such a launcher under a build without MPI, and so is an incomplete set of the
// store's variables.
// Called by engine (World::from_environment).
#pragma once

#include "comm/deadline.h"
#include "comm/rendezvous.h"
#include "comm/store.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace tandem::comm {

using Environment = std::function<const char*(const char*)>;  // std::getenv, or a test's table

struct LauncherClaim {
  std::string variable;  // e.g. "SLURM_NTASKS"
  int size = 1;
};

/// The largest world size that any launcher's variable claims, with the variable; nothing if none.
[[nodiscard]] std::optional<LauncherClaim> launcher_claim(const Environment& environment);

/// True when started under mpirun, mpiexec or srun, so that MPI should be asked.
[[nodiscard]] bool under_mpi_launcher(const Environment& environment);

/// Throws SystemError, saying what to do, when `claim` says more ranks than `actual_size`.
void refuse_silent_worlds(const std::optional<LauncherClaim>& claim, int actual_size);

/// Where and as whom a process meets the others over a store.
struct StoreLaunch {
  std::string host;  // MASTER_ADDR
  int port = 0;      // MASTER_PORT
  int rank = 0;
  int size = 1;
  bool agent_hosts = false;  // torchrun's agent keeps the store, else rank 0 does
};

/// What the store's variables say; nothing if MASTER_ADDR and MASTER_PORT are not set. Throws
/// SystemError naming the variable that is missing or no such number.
[[nodiscard]] std::optional<StoreLaunch> store_launch(const Environment& environment);

/// How the others are reached.
enum class Launch : std::uint8_t { kAlone, kMpi, kStore };

/// `mpi_initialized`: by the program or an earlier world. Without TANDEM_HAVE_MPI never kMpi.
[[nodiscard]] Launch how_launched(const Environment& environment, bool mpi_initialized);

/// Opens the store of a launch; comm knows none. Without one a launch over a store is refused.
using StoreFactory = std::function<std::shared_ptr<Store>(const StoreLaunch&, Deadline)>;

/// The rendezvous that how_launched() says. Warns on stderr once if this process may use one core
/// only while its torch threads say more (mpirun's default binding: use --bind-to none).
/// `ranks_per_node`: see make_mpi_rendezvous().
/// Throws InvalidArgument, SystemError and Timeout.
std::unique_ptr<Rendezvous> rendezvous_from_environment(Deadline deadline,
                                                        int ranks_per_node = 0,
                                                        const StoreFactory& open_store = {});

}  // namespace tandem::comm
