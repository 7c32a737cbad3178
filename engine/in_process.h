// engine/in_process.h: worlds whose ranks are threads of this process, on devices of the caller's
// choice: World::in_process(), and tests that simulate a GPU.
#pragma once

#include "engine/lane.h"
#include <tandem/options.h>
#include <tandem/world.h>

#include <functional>
#include <memory>
#include <vector>

namespace tandem::engine {

using LanesOfRank = std::function<std::unique_ptr<Lanes>(int rank)>;

/// A world for each rank, in rank order. Throws InvalidArgument if `size` is below 1.
[[nodiscard]] std::vector<World> make_in_process(int size,
                                                 const WorldOptions& options,
                                                 const LanesOfRank& lanes);

}  // namespace tandem::engine
