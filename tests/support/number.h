// tests/support/number.h: the smallest engine: one number whose gradient a test chooses.
#pragma once

#include "tests/support/models.h"
#include <tandem/error.h>
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

namespace tandem::testing {

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

/// One number "w" under SGD with learning rate 1: after a step it has moved by minus its gradient.
inline ScaleEngine number(World& world, const char* name, double value = 0.0) {
  return {world, std::make_shared<Scale>(1, value), {.name = name, .optimizer = Sgd{.lr = 1.0}}};
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

/// One step of plain SGD with learning rate 1.
inline void sgd_step(World& world, ScaleEngine& net, double gradient) {
  const float before = value_of(net);
  gradient_of(net, gradient).backward();
  EXPECT_TRUE(world.step().applied);
  EXPECT_EQ(value_of(net), before - static_cast<float>(gradient));
}

}  // namespace tandem::testing
