#include "comm/launcher.h"

#include "comm/store_rendezvous.h"
#include <tandem/error.h>

#include <climits>

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

/// A whole number in [least, most] that a variable of the store's launch holds.
int number_of(const std::string& variable, const char* text, int least, int most) {
  int number = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, number);
  if (error == std::errc{} && stop == end && number >= least && number <= most) return number;
  throw SystemError("the environment variable " + variable + " is '" + text + "'; it is a number " +
                    (most == INT_MAX
                         ? "of at least " + std::to_string(least)
                         : "from " + std::to_string(least) + " to " + std::to_string(most)) +
                    ": set it as torchrun does, or unset MASTER_ADDR and MASTER_PORT");
}

#if TANDEM_HAVE_MPI
bool started_by_torchrun(const Environment& environment) {
  return value_of(environment, "TORCHELASTIC_RUN_ID") != nullptr;
}
#endif

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
    advice =
        "start the program with mpirun or srun, or set MASTER_ADDR, MASTER_PORT and RANK as well, "
        "or unset it";
  } else {
    advice = "use the mpirun of the MPI that Tandem was built with, or unset it";
  }
#if !TANDEM_HAVE_MPI
  advice +=
      "; this build has no MPI: configure with TANDEM_MPI=ON, or set MASTER_ADDR, MASTER_PORT, "
      "RANK and WORLD_SIZE";
#endif
  throw SystemError("the launcher says " + std::to_string(claim->size) + " ranks (" +
                    claim->variable + "=" + std::to_string(claim->size) + ") but this world has " +
                    std::to_string(actual_size) + ", so " + std::to_string(claim->size) +
                    " programs would train alone without knowing of each other; " + advice);
}

std::optional<StoreLaunch> store_launch(const Environment& environment) {
  const char* const host = value_of(environment, "MASTER_ADDR");
  const char* const port = value_of(environment, "MASTER_PORT");
  if (host == nullptr && port == nullptr) return std::nullopt;
  // A task of srun, and not the shell of an allocation.
  const bool task = value_of(environment, "SLURM_PROCID") != nullptr;
  const auto choose = [&](const char* variable, const char* of_slurm) {
    return value_of(environment, variable) == nullptr && task ? of_slurm : variable;
  };
  const char* const rank_variable = choose("RANK", "SLURM_PROCID");
  const char* const size_variable = choose("WORLD_SIZE", "SLURM_NTASKS");
  const char* const rank = value_of(environment, rank_variable);
  const char* const size = value_of(environment, size_variable);
  std::string missing;
  for (const char* const variable : {"MASTER_ADDR", "MASTER_PORT", rank_variable, size_variable}) {
    if (value_of(environment, variable) == nullptr) {
      missing += (missing.empty() ? "" : ", ") + std::string(variable);
    }
  }
  if (!missing.empty()) {
    throw SystemError(
        "of the environment variables MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE some are set "
        "and not " +
        missing +
        "; start the program with torchrun, srun or mpirun, or set all four, or unset MASTER_ADDR "
        "and MASTER_PORT");
  }
  StoreLaunch launch;
  launch.host = host;
  launch.port = number_of("MASTER_PORT", port, 1, 65535);
  launch.size = number_of(size_variable, size, 1, INT_MAX);
  launch.rank = number_of(rank_variable, rank, 0, launch.size - 1);
  const char* const agent = value_of(environment, "TORCHELASTIC_USE_AGENT_STORE");
  launch.agent_hosts = agent != nullptr && std::strcmp(agent, "True") == 0;
  return launch;
}

Launch how_launched(const Environment& environment, bool mpi_initialized) {
  const bool has_store = value_of(environment, "MASTER_ADDR") != nullptr ||
                         value_of(environment, "MASTER_PORT") != nullptr;
#if TANDEM_HAVE_MPI
  if (mpi_initialized) return Launch::kMpi;
  if (!(has_store && started_by_torchrun(environment))) {
    for (const char* const variable :
         {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
      if (value_of(environment, variable) != nullptr) return Launch::kMpi;
    }
  }
  if (!has_store && under_mpi_launcher(environment)) return Launch::kMpi;
#else
  static_cast<void>(mpi_initialized);
#endif
  return has_store ? Launch::kStore : Launch::kAlone;
}

std::unique_ptr<Rendezvous> rendezvous_from_environment(Deadline deadline,
                                                        int ranks_per_node,
                                                        const StoreFactory& open_store) {
  const Environment environment = [](const char* name) { return std::getenv(name); };
#if TANDEM_HAVE_MPI
  const Launch launch = how_launched(environment, mpi_is_initialized());
#else
  const Launch launch = how_launched(environment, false);
#endif
  const bool launched = under_mpi_launcher(environment);
  std::unique_ptr<Rendezvous> rendezvous;
  if (launch == Launch::kStore) {
    const StoreLaunch store = store_launch(environment).value();
    if (store.size > 1) {
      if (!open_store) {
        throw SystemError(
            "MASTER_ADDR and MASTER_PORT are set, but this program takes no store; start it with "
            "mpirun and unset them");
      }
      rendezvous = make_store_rendezvous(
          open_store(store, deadline),
          StoreRanks{.group = {store.rank, store.size}, .ranks_per_node = ranks_per_node},
          deadline);
      if (store.rank == 0) warn_of_one_core();
      return rendezvous;  // its variables are what started this process
    }
  }
#if TANDEM_HAVE_MPI
  if (launch == Launch::kMpi) rendezvous = make_mpi_rendezvous(deadline, ranks_per_node);
#endif
  if (!rendezvous) rendezvous = make_self_rendezvous();
  if (launch != Launch::kStore) {
    refuse_silent_worlds(launcher_claim(environment), rendezvous->group().size);
  }
  if (launched && rendezvous->group().rank == 0) warn_of_one_core();
  return rendezvous;
}

}  // namespace tandem::comm
