// tests/support/scenario.h: one training loop, written once and run by Tandem (trainer.h) and by
// oracles of one process (oracle.h).
#pragma once

#include "tests/support/models.h"
#include <tandem/options.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace tandem::testing {

/// Where a micro-batch is computed. Dealt round-robin, so that `micro_batch` means the same data
/// for every world size.
struct Place {
  int step = 0;
  int pass = 0;  // of this rank, in this step
  int rank = 0;
  int world_size = 1;

  [[nodiscard]] int micro_batch() const { return pass * world_size + rank; }
};

enum class BackwardCall : std::uint8_t {
  kPlain,   // loss.backward()
  kEngine,  // the first engine's backward()
  kWorld,   // world.backward()
};

struct Scenario {
  /// The same values at each call.
  std::function<Nets()> nets;
  /// Losses of one micro-batch; each has a backward call of its own, on one retained graph.
  std::function<std::vector<at::Tensor>(const Nets&, const Place&)> losses;
  /// Before each micro-batch (freezing); sets everything it may ever set.
  std::function<void(const Nets&, const Place&)> prepare = [](const Nets&, const Place&) {};
  /// Micro-batches of a rank in a step.
  std::function<int(int step, int rank, int world_size)> passes = [](int, int, int) { return 1; };
  /// Tokens that a micro-batch counts, for Average::kTokens.
  std::function<std::int64_t(const Place&)> tokens = [](const Place&) { return 0; };
  /// Passes run inside world.hold().
  std::function<bool(const Place&)> hold = [](const Place&) { return false; };
  /// Factor on what net `net` has accumulated, said on every rank after the ranks' micro-batch
  /// place.pass, also where there was none; the same on every rank.
  std::function<double(const Place&, std::size_t net)> multiply = [](const Place&, std::size_t) {
    return 1.0;
  };
  /// Losses go through World::scale(), which begins with this; a power of two.
  std::optional<double> loss_scale = std::nullopt;
  /// Factor on every engine's learning rate.
  std::function<double(int step)> schedule = [](int) { return 1.0; };

  int steps = 20;
  Average average = Average::kRanks;
  std::optional<double> clip_norm = std::nullopt;
  double norm_type = 2.0;
  BackwardCall call = BackwardCall::kPlain;
  /// One for each net; `name` and the rest as for the engine.
  std::vector<EngineOptions> engines;

  /// False where sums are legitimately taken in another order than (pass, rank): something held, or
  /// a parameter that arrives twice in a pass.
  bool bitwise = true;
  /// False where the micro-batches of a step cannot be one graph (freezing that differs between
  /// them, nets that are multiplied differently).
  bool one_graph = true;

  /// Micro-batches of the rank that has most of them.
  [[nodiscard]] int most_passes(int step, int world_size) const {
    int most = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      most = std::max(most, passes(step, rank, world_size));
    }
    return most;
  }
};

}  // namespace tandem::testing
