// comm/launcher.h: what the environment says about how this process was started.
//
// N silent worlds of one are worse than an error: a launcher that says more ranks than MPI has
// (SLURM_NTASKS, PMI_SIZE, OMPI_COMM_WORLD_SIZE, or WORLD_SIZE without MASTER_ADDR, above 1) is
// refused, and so is such a launcher under a build without MPI.
// Called by engine (World::from_environment).
#pragma once

#include "comm/deadline.h"
#include "comm/rendezvous.h"

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

/// MPI under a launcher, else one rank. Warns on stderr once if this process may use one core only
/// while its torch threads say more (mpirun's default binding: use --bind-to none).
/// `ranks_per_node`: see make_mpi_rendezvous().
std::unique_ptr<Rendezvous> rendezvous_from_environment(Deadline deadline, int ranks_per_node = 0);

}  // namespace tandem::comm
