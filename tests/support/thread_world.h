// tests/support/thread_world.h: ranks for tests, as threads of this process or as the processes of
// mpirun.
//
// TANDEM_TEST_RANKS_PER_NODE in the environment makes nodes of so many ranks (see WorldOptions) of
// every world whose options do not say anything else: so every scenario can be run between nodes.
// TANDEM_TEST_SIMULATED=nccl, staged or mixed puts the engines of worlds of threads on simulated
// GPUs (simulated_lanes.h).
//
// Every runner gives each rank its own World, closes it in order when the body returns, and carries
// every rank's exception home with its rank: a failing rank is never hidden by another that only
// waited for it.
#pragma once

#include <tandem/world.h>

#include <chrono>
#include <functional>
#include <vector>

namespace tandem::testing {

using Body = std::function<void(World&)>;

/// Long enough for a loaded machine, short enough that a hang ends as a Timeout that names what was
/// awaited, before the test's own limit.
inline constexpr std::chrono::seconds kPatience{30};

/// True if worlds of threads, also those of one, train on simulated GPUs.
bool on_simulated_gpus();

/// True if models train on a real GPU (TANDEM_TEST_DEVICE=cuda): ranks are processes then.
bool on_a_gpu();

/// Default options with kPatience as deadline.
WorldOptions patient();

/// Ranks that the launcher started; 1 without one.
int launched_ranks();

/// Runs `body` on `size` threads. Rethrows what ranks threw, all of it in one std::runtime_error.
void on_threads(int size, const WorldOptions& options, const Body& body);
/// The same on worlds that the test has made, of ranks 0, 1, ...
void on_threads(std::vector<World> worlds, const Body& body);

/// Under a launcher with several ranks: runs `body` as this process's rank. Alone: on a world of
/// one, then on thread worlds of two and three, so that every scenario runs in both forms.
/// `smallest` leaves out sizes for which a scenario says nothing.
void on_ranks(const WorldOptions& options, const Body& body, int smallest = 1);

/// For scenarios of a fixed size: the launcher's ranks if it started just so many, else threads.
void on_exactly(int size, const WorldOptions& options, const Body& body);

}  // namespace tandem::testing
