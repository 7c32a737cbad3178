// engine/step_part.h: one engine's part of a step, from its gate to its update.
// Called by engine's step and joint norm.
#pragma once

#include "engine/engine_core.h"
#include "engine/messages.h"
#include "engine/world_state.h"
#include "kernels/powers.h"
#include "kernels/superaccumulator.h"

#include <cstdint>

namespace tandem::engine {

struct WorldState::Part {
  EngineCore* core = nullptr;
  Bits seen;  // per parameter, on any rank; all false: the engine is left alone
  bool unseen = true;
  Averaging averaging;
  std::int64_t tokens = 0;

  // of its gradient sums, for the norm
  kernels::Power power;           // but for infinity
  kernels::Superaccumulator sum;  // likewise
  double largest = 0.0;           // where kernels::needs_largest()
};

}  // namespace tandem::engine
