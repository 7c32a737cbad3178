// tests/support/thread_world.cpp: see thread_world.h.
#include "tests/support/thread_world.h"

#include "engine/in_process.h"
#include "tests/support/simulated_lanes.h"

#include <ATen/Parallel.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if TANDEM_HAVE_MPI
#include <mpi.h>
#endif

namespace tandem::testing {
namespace {

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

/// `options`, with nodes as the environment says.
WorldOptions on_nodes(WorldOptions options) {
  const char* const forced = std::getenv("TANDEM_TEST_RANKS_PER_NODE");
  if (forced != nullptr && options.ranks_per_node == 0) {
    options.ranks_per_node = std::stoi(forced);
  }
  return options;
}

/// A world of threads; on simulated GPUs if the environment says so.
std::vector<World> make_worlds(int size, const WorldOptions& options) {
  const char* const simulated = std::getenv("TANDEM_TEST_SIMULATED");
  if (simulated == nullptr) {
    return World::in_process(size, on_nodes(options));
  }
  const WorldOptions chosen = on_nodes(options);
  SimulatedGpus gpus;
  const std::string how(simulated);
  gpus.mixed = how == "mixed";
  if (how != "staged") gpus.nccl = std::make_shared<test_support::FakeNccl>(size);
  return engine::make_in_process(size, chosen, simulated_lanes(std::move(gpus), chosen));
}

void run_as(World world, const char* kind, const Body& body) {
  // Ranks compute alone: more threads would change the order of sums inside LibTorch.
  at::set_num_threads(1);
  SCOPED_TRACE("rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size()) +
               ", " + kind);
  body(world);
}

}  // namespace

bool on_simulated_gpus() { return std::getenv("TANDEM_TEST_SIMULATED") != nullptr; }

WorldOptions patient() { return {.timeout = kPatience}; }

int launched_ranks() {
  int size = 1;
#if TANDEM_HAVE_MPI
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) {
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
  }
#endif
  if (std::getenv("MASTER_ADDR") != nullptr) {
    size = std::stoi(std::getenv("WORLD_SIZE"));
  }
  return size;
}

bool on_a_gpu() {
  const char* const device = std::getenv("TANDEM_TEST_DEVICE");
  return device != nullptr && std::string(device) == "cuda";
}

void on_threads(int size, const WorldOptions& options, const Body& body) {
  if (size > 1 && on_a_gpu()) {
    GTEST_SKIP() << "not run: the ranks of one process share no GPU";
  }
  on_threads(make_worlds(size, options), body);
}

void on_threads(std::vector<World> worlds, const Body& body) {
  std::vector<std::exception_ptr> errors(worlds.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < worlds.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_as(std::move(worlds[rank]), "threads", body);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::string report;
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank]) {
      report += "\nrank " + std::to_string(rank) + " of " + std::to_string(errors.size()) +
                " threw: " + what_of(errors[rank]);
    }
  }
  if (!report.empty()) {
    throw std::runtime_error(report);
  }
}

void on_ranks(const WorldOptions& options, const Body& body, int smallest) {
  if (launched_ranks() > 1) {
    run_as(World::from_environment(on_nodes(options)), "processes", body);
    return;
  }
  if (smallest <= 1 && on_simulated_gpus()) {
    on_threads(1, options, body);
  } else if (smallest <= 1) {
    run_as(World::from_environment(on_nodes(options)), "alone", body);
  }
  for (const int size : {2, 3}) {
    if (size >= smallest && !on_a_gpu()) {
      on_threads(size, options, body);
    }
  }
}

void on_exactly(int size, const WorldOptions& options, const Body& body) {
  if (launched_ranks() == size) {
    run_as(World::from_environment(on_nodes(options)), "processes", body);
  } else {
    on_threads(size, options, body);
  }
}

}  // namespace tandem::testing
