#include "comm/launcher.h"

#include <tandem/error.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sched.h>
#include <unistd.h>

#if TANDEM_HAVE_MPI
#include "comm/mpi_rendezvous.h"
#endif

namespace tandem::comm {

namespace {

/// A variable that is set and not empty.
const char* value_of(const Environment& environment, const char* variable) {
  const char* const value = environment(variable);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

void consider(std::optional<LauncherClaim>& claim,
              const Environment& environment,
              const char* variable) {
  const char* const text = value_of(environment, variable);
  if (text == nullptr) return;
  int size = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, size);
  if (error != std::errc{} || stop != end || size < 1) {
    throw SystemError(std::string("the environment variable ") + variable + " is '" + text +
                      "', which is no number of ranks; unset it or start the program with mpirun");
  }
  if (!claim || size > claim->size) claim = LauncherClaim{variable, size};
}

/// mpirun's default binding gives each rank one core, which its reduction thread then shares with
/// its backward pass.
void warn_of_one_core() {
  static bool warned = false;  // worlds are made by one thread of a process at a time
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (warned || sched_getaffinity(0, sizeof(cores), &cores) != 0) return;
  const long machine = sysconf(_SC_NPROCESSORS_ONLN);
  if (CPU_COUNT(&cores) != 1 || machine < 2) return;
  warned = true;
  std::fprintf(
      stderr,
      "tandem: each rank is bound to one of this machine's %ld cores, so reductions cannot "
      "run beside backward; start with mpirun --bind-to none (srun --cpu-bind=none)\n",
      machine);
}

}  // namespace

std::optional<LauncherClaim> launcher_claim(const Environment& environment) {
  std::optional<LauncherClaim> claim;
  // What started this very process knows best: mpirun -np 2 inside a batch job of 4 tasks is a
  // world of 2.
  consider(claim, environment, "OMPI_COMM_WORLD_SIZE");
  consider(claim, environment, "PMI_SIZE");
  if (claim) return claim;
  // Without SLURM_PROCID this is the shell of an allocation and no task.
  if (value_of(environment, "SLURM_PROCID") != nullptr) {
    consider(claim, environment, "SLURM_NTASKS");
  }
  // torchrun's and PyTorch's variables come as a set; alone, WORLD_SIZE says that somebody meant
  // to start several ranks.
  if (value_of(environment, "MASTER_ADDR") == nullptr) {
    consider(claim, environment, "WORLD_SIZE");
  }
  return claim;
}

bool under_mpi_launcher(const Environment& environment) {
  for (const char* const variable :
       {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"}) {
    if (value_of(environment, variable) != nullptr) return true;
  }
  return false;
}

void refuse_silent_worlds(const std::optional<LauncherClaim>& claim, int actual_size) {
  if (!claim || claim->size <= actual_size) return;
  std::string advice;
  if (claim->variable == "SLURM_NTASKS") {
    advice = "start the program with srun or mpirun (not plainly in the batch script), or unset it";
  } else if (claim->variable == "WORLD_SIZE") {
    advice = "start the program with mpirun or srun, or unset it";
  } else {
    advice = "use the mpirun of the MPI that Tandem was built with, or unset it";
  }
#if !TANDEM_HAVE_MPI
  advice += "; this build has no MPI: configure with TANDEM_MPI=ON for more than one rank";
#endif
  throw SystemError("the launcher says " + std::to_string(claim->size) + " ranks (" +
                    claim->variable + "=" + std::to_string(claim->size) + ") but this world has " +
                    std::to_string(actual_size) + ", so " + std::to_string(claim->size) +
                    " programs would train alone without knowing of each other; " + advice);
}

std::unique_ptr<Rendezvous> rendezvous_from_environment([[maybe_unused]] Deadline deadline,
                                                        [[maybe_unused]] int ranks_per_node) {
  const Environment environment = [](const char* name) { return std::getenv(name); };
  const auto claim = launcher_claim(environment);
  const bool launched = under_mpi_launcher(environment);
  std::unique_ptr<Rendezvous> rendezvous;
#if TANDEM_HAVE_MPI
  if (launched || mpi_is_initialized()) {
    rendezvous = make_mpi_rendezvous(deadline, ranks_per_node);
  }
#endif
  if (!rendezvous) rendezvous = make_self_rendezvous();
  refuse_silent_worlds(claim, rendezvous->group().size);
  if (launched && rendezvous->group().rank == 0) warn_of_one_core();
  return rendezvous;
}

}  // namespace tandem::comm
