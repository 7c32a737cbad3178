// tests/support/number.h: the smallest engine: one number whose gradient a test chooses.
#pragma once

#include "tests/support/models.h"
#include "tests/support/thread_world.h"
#include <tandem/error.h>
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace tandem::testing {

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

/// One number "w" under SGD with learning rate 1: after a step it has moved by minus its gradient.
inline ScaleEngine number(World& world, const char* name, double value = 0.0, int stage = 2) {
  return {world,
          std::make_shared<Scale>(1, value),
          {.name = name, .optimizer = Sgd{.lr = 1.0}, .stage = stage}};
}

inline at::Tensor gradient_of(ScaleEngine& engine, double gradient) {
  return engine.forward(torch::full({1}, gradient, torch::kFloat32)).sum();
}

inline float value_of(ScaleEngine& engine) { return engine->w.item<float>(); }

/// What `call` refused, as text; empty if nothing.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

/// What `call` threw as a Mismatch; empty if nothing.
inline std::string mismatch(const std::function<void()>& call) {
  try {
    call();
  } catch (const Mismatch& error) {
    return error.what();
  }
  return "";
}

/// Options whose gradients are sums over ranks, divided by nothing: whole numbers stay whole.
inline WorldOptions summed() {
  WorldOptions options = patient();
  options.average = Average::kNone;
  return options;
}

/// A pass of `gradient` * 2^rank; with summed() that is `gradient` * ranks_sum() altogether.
inline void rank_pass(World& world, ScaleEngine& net, double gradient, bool hold = false) {
  std::optional<Scope> scope;
  if (hold) {
    scope.emplace(world.hold());
  }
  gradient_of(net, std::ldexp(gradient, world.rank())).backward();
}

inline float ranks_sum(const World& world) { return std::ldexp(1.0F, world.size()) - 1.0F; }

/// One step of plain SGD with learning rate 1.
inline void sgd_step(World& world, ScaleEngine& net, double gradient) {
  const float before = value_of(net);
  gradient_of(net, gradient).backward();
  EXPECT_TRUE(world.step().applied);
  EXPECT_EQ(value_of(net), before - static_cast<float>(gradient));
}

}  // namespace tandem::testing
