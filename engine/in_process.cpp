#include "engine/in_process.h"

#include "engine/world_state.h"

#include <exception>
#include <string>
#include <thread>
#include <utility>

namespace tandem::engine {

/// World's friend: its constructor is not for users.
struct WorldMaker {
  static World make(std::shared_ptr<WorldState> state) { return World(std::move(state)); }
};

std::vector<World> make_in_process(int size,
                                   const WorldOptions& options,
                                   const LanesOfRank& lanes) {
  if (size < 1) {
    throw InvalidArgument("World::in_process: " + std::to_string(size) +
                          " ranks; there is at least 1");
  }
  // Making a world is collective: each rank's side is made on a thread of its own.
  std::vector<std::unique_ptr<comm::Rendezvous>> rendezvous = comm::make_thread_rendezvous(
      size, {.ranks_per_node = options.ranks_per_node,
             .delays = {.seed = options.queue_delay_seed, .max_us = options.queue_delay_us}});
  std::vector<std::shared_ptr<WorldState>> states(rendezvous.size());
  std::vector<std::exception_ptr> errors(rendezvous.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < rendezvous.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        states[rank] = std::make_shared<WorldState>(std::move(rendezvous[rank]), options,
                                                    lanes(static_cast<int>(rank)));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::vector<World> worlds;
  for (std::size_t rank = 0; rank < states.size(); ++rank) {
    if (errors[rank]) {
      std::rethrow_exception(errors[rank]);
    }
    worlds.push_back(WorldMaker::make(std::move(states[rank])));
  }
  return worlds;
}

}  // namespace tandem::engine
