// A program that leaves MPI to its worlds. Worlds closed in order: MPI is finalized at exit
// (without that mpirun would report a failure). With "unclosed": a world that was not closed keeps
// MPI from being finalized, since its peers may be gone.
#include "comm/launcher.h"
#include "comm/mpi_rendezvous.h"

#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace {

bool expect_finalized = true;

/// Registered before MPI is initialised, so called after everything else at exit.
void check_at_exit() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if ((finalized != 0) == expect_finalized) return;
  std::fprintf(stderr, "MPI is %sfinalized at exit\n", finalized != 0 ? "" : "not ");
  _exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tandem::comm;
  const bool unclosed = argc > 1 && std::strcmp(argv[1], "unclosed") == 0;
  expect_finalized = !unclosed;
  std::atexit(check_at_exit);
  if (mpi_is_initialized()) return 2;
  const auto deadline = Deadline::after(std::chrono::seconds(30));
  if (unclosed) {
    make_mpi_rendezvous(deadline);
    return 0;
  }
  for (int world = 0; world < 2; ++world) {
    const auto rendezvous = rendezvous_from_environment(deadline);
    if (rendezvous->group().size != 2) return 3;
    rendezvous->close(deadline);
  }
  return 0;
}
