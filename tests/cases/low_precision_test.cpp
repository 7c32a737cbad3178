// Cases: updates and sums in bf16 that were rounded away, one by one.
#include "tests/support/models.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <ATen/Context.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace tandem::testing {
namespace {

using ScaleEngine = Engine<std::shared_ptr<Scale>>;

ScaleEngine number(World& world, double value, const Optimizer& optimizer, int stage = 2) {
  return {world,
          std::make_shared<Scale>(1, value, at::kBFloat16),
          {.name = "net", .optimizer = optimizer, .stage = stage}};
}

void pass(ScaleEngine& net, double gradient) {
  net.forward(torch::full({1}, gradient, torch::kFloat32)).sum().backward();
}

double value_of(const ScaleEngine& net) { return net.ptr()->w.item<double>(); }

// w = 1, learning rate 6e-4, 100 unit gradients: 1 - 0.06 = 0.94; without masters 1.0 - 6e-4 rounds
// to 1.0 each time. bf16 below 1 is spaced 2^-8: the nearest to 0.94 is within half of that.
TEST(Cases, N12_TinyUpdatesAreNotLost) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, 1.0, Sgd{.lr = 6e-4});
    for (int i = 0; i < 100; ++i) {
      pass(net, 1.0);
      world.step();
    }
    EXPECT_NEAR(value_of(net), 0.94, 0.5 / 256 + 1e-5);
  });
}

// Decay of 1e-4 a step, 1,000 steps: 0.9999^1000 = 0.9048; in bf16 alone it would stay 1.
TEST(Cases, N12_TinyDecayIsNotLost) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, 1.0, AdamW{.lr = 1.0, .weight_decay = 1e-4});
    for (int i = 0; i < 1000; ++i) {
      pass(net, 0.0);
      world.step();
    }
    EXPECT_NEAR(value_of(net), std::pow(0.9999, 1000), 0.5 / 256 + 1e-4);
  });
}

// 1 + 512 * 2^-9 = 2, where each addition alone is half of bf16's spacing above 1.
TEST(Cases, N12_HalfUnitUpdatesAddUp) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, 1.0, Sgd{.lr = 1.0});
    for (int i = 0; i < 512; ++i) {
      pass(net, -std::ldexp(1.0, -9));
      world.step();
    }
    EXPECT_EQ(value_of(net), 2.0);
  });
}

// The same for every optimizer: w = 1 in 16 bits, a constant gradient, updates that move it by
// about 6e-4 each: far below half of bf16's spacing under 1 (2^-9). The fp32 engine beside it says
// where the movement leads; the 16-bit one must be within half its spacing of that, both with
// separate masters and with remainders.
TEST(Cases, N12_TinyUpdatesOfEveryOptimizerAreNotLost) {
  const std::vector<Optimizer> optimizers = {AdamW{.lr = 6e-4},
                                             AdamW{.lr = 6e-4, .amsgrad = true},
                                             Adam{.lr = 6e-4},
                                             Sgd{.lr = 6e-5, .momentum = 0.9},
                                             Sgd{.lr = 6e-5, .momentum = 0.9, .nesterov = true},
                                             RmsProp{.lr = 6e-4},
                                             RmsProp{.lr = 6e-5, .momentum = 0.9, .centered = true},
                                             Adagrad{.lr = 3e-3},
                                             Lion{.lr = 6e-4}};
  on_ranks(patient(), [&](World& world) {
    for (std::size_t i = 0; i < optimizers.size(); ++i) {
      SCOPED_TRACE(i);
      const auto make = [&](const char* name, at::ScalarType dtype, Masters masters) {
        return ScaleEngine(world, std::make_shared<Scale>(1, 1.0, dtype),
                           {.name = name, .optimizer = optimizers[i], .masters = masters});
      };
      auto exact = make("exact", at::kFloat, Masters::kSeparate);
      auto bf16 = make("bf16", at::kBFloat16, Masters::kSeparate);
      auto remainder = make("remainder", at::kBFloat16, Masters::kRemainder);
      auto fp16 = make("fp16", at::kHalf, Masters::kSeparate);
      for (int step = 0; step < 100; ++step) {
        pass(exact, 1.0);
        pass(bf16, 1.0);
        pass(remainder, 1.0);
        pass(fp16, 1.0);
        world.step();
      }
      const double value = value_of(exact);
      EXPECT_LT(value, 0.99);
      EXPECT_NEAR(value_of(bf16), value, 0.5 / 256 + 1e-5);
      EXPECT_EQ(value_of(remainder), value_of(bf16));
      EXPECT_NEAR(value_of(fp16), value, 0.5 / 2048 + 1e-5);
    }
  });
}

// bf16 engines were never clipped. By the norm that is reported, for every type of norm; the fp32
// master moves by lr * clip_norm, and a bf16 number at 1/2 is spaced 2^-9.
TEST(Cases, N23_Bf16GradientsAreClipped) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    on_ranks(patient(), [&](World& world) {
      auto net = number(world, 1.0, Sgd{.lr = 1.0});
      pass(net, 8.0);
      const StepResult result = world.step({.clip_norm = 0.5, .norm_type = p});
      EXPECT_EQ(result.norm, 8.0);
      EXPECT_NEAR(result.clip_factor, 0.5 / 8.0, 1e-6);
      EXPECT_NEAR(value_of(net), 0.5, 1e-6 + 1.0 / 1024);
    });
  }
}

// One bf16 infinity on one rank stayed in Adam's moments. The step is skipped by norms of every
// type, and the next one is Adam's first: of gradient 1, lr * 1 / (1 + eps).
TEST(Cases, N23_OneBf16InfinityDoesNotPoisonAdamsState) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    on_ranks(patient(), [&](World& world) {
      auto net = number(world, 1.0, Adam{.lr = 0.25});
      pass(net, world.rank() == 0 ? std::numeric_limits<double>::infinity() : 1.0);
      const StepResult skipped = world.step({.clip_norm = 2.0, .norm_type = p});
      EXPECT_EQ(skipped.reason, StepReason::kNonFinite);
      EXPECT_EQ(net.step_count("w"), 0);
      EXPECT_EQ(value_of(net), 1.0);
      pass(net, 1.0);
      EXPECT_TRUE(world.step({.clip_norm = 2.0, .norm_type = p}).applied);
      EXPECT_EQ(net.step_count("w"), 1);
      EXPECT_EQ(value_of(net), 0.75);  // 0.25 (1 - 1e-8) is rounded
    });
  }
}

// Denormal policy: they are kept, on the wire and in sums and updates, whatever the thread that
// steps has set. 2^-130 is denormal in fp32 and bf16; times a learning rate of 2^100 it moves w to
// -2^-30, exactly.
TEST(Cases, N21_DenormalGradientsAreKept) {
  on_ranks(patient(), [](World& world) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const Wire wire : {Wire::kParameter, Wire::kFloat32, Wire::kBFloat16}) {
        for (const bool flush : {false, true}) {
          ScaleEngine net(
              world, std::make_shared<Scale>(1, 0.0, dtype),
              {.name = "net", .optimizer = Sgd{.lr = std::ldexp(1.0, 100)}, .wire = wire});
          pass(net, std::ldexp(1.0, -130));
          at::globalContext().setFlushDenormal(flush);
          const StepResult result = world.step();
          at::globalContext().setFlushDenormal(false);
          EXPECT_EQ(result.norm, std::ldexp(1.0, -130));
          EXPECT_EQ(value_of(net), -std::ldexp(1.0, -30));
        }
      }
    }
  });
}

// 301 gradients of 1.0 in one window. A bf16 sum stops at 256; a sum rounded at the end gives 300
// or 302. -301 itself is no bf16 number: halves away from zero it shows as -302, and one more +1 as
// -300.
void expect_301(World& world, int stage, bool hold) {
  auto net = number(world, 0.0, Sgd{.lr = 1.0}, stage);
  for (int i = 0; i < 301; ++i) {
    std::optional<Scope> scope;
    if (hold) {
      scope.emplace(world.hold());
    }
    pass(net, 1.0);
  }
  const StepResult result = world.step();
  EXPECT_EQ(result.denominator, world.size());
  EXPECT_EQ(result.norm, 301.0);
  EXPECT_EQ(value_of(net), -302.0);
  pass(net, -1.0);
  world.step();
  EXPECT_EQ(value_of(net), -300.0);
}

TEST(Cases, N12_301GradientsOfOneAre301) {
  on_ranks(patient(), [](World& world) {
    expect_301(world, 2, false);
    expect_301(world, 1, false);
  });
}

TEST(Cases, N12_301HeldGradientsOfOneAre301) {
  on_ranks(patient(), [](World& world) { expect_301(world, 1, true); });
}

}  // namespace
}  // namespace tandem::testing
