// tests/integration/token_means_test.cpp: the mean over the tokens of all ranks, by sums that are
// counted, by weighted means, by a multiplier and by counts summed up front; and what each Average
// divides by.
#include "tests/support/token_fixture.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

/// One step of the fixture, counted; which passes of a rank are held.
struct Shape {
  int engines;
  int stage;
  at::ScalarType dtype;
  int held;  // of the first passes: 0, 1 or 2
};

/// One factor 1/38, rounded to fp32, times 97, rounded again: 3e-7; 16-bit parameters then by half
/// a unit of [2, 4).
double bound_of(at::ScalarType dtype) {
  return 1e-6 + (dtype == at::kBFloat16 ? 0x1p-7 : dtype == at::kHalf ? 0x1p-10 : 0.0);
}

void step_of_the_fixture(World& world, const Shape& shape) {
  std::deque<ScaleEngine> nets;
  for (int e = 0; e < shape.engines; ++e) {
    nets.emplace_back(
        world, std::make_shared<Scale>(1, 0.0, shape.dtype),
        EngineOptions{
            .name = "net" + std::to_string(e), .optimizer = Sgd{.lr = 1.0}, .stage = shape.stage});
  }
  int pass = 0;
  for (const Piece& piece : pieces_of(world)) {
    std::vector<Scope> hold;
    if (pass++ < shape.held) {
      hold.push_back(world.hold());
    }
    at::Tensor loss = torch::zeros({});
    for (ScaleEngine& net : nets) {
      loss = loss + gradient_of(net, static_cast<double>(piece.tokens) * piece.gradient);
    }
    loss.backward();
    world.count_tokens(piece.tokens);
  }
  const StepResult result = world.step();
  EXPECT_TRUE(result.applied);
  EXPECT_EQ(result.denominator, kTokens);
  EXPECT_NEAR(result.norm, kMean * std::sqrt(shape.engines), 1e-14);
  for (int e = 0; e < shape.engines; ++e) {
    const EngineStep& engine = result.engines[static_cast<std::size_t>(e)];
    EXPECT_EQ(engine.tokens, 38);
    EXPECT_EQ(engine.pairs, 4);
    EXPECT_EQ(engine.denominator, kTokens);
    EXPECT_EQ(engine.norm, kMean);
    expect_mean(-nets[static_cast<std::size_t>(e)]->w.item<double>(), bound_of(shape.dtype));
  }
}

TEST(TokenMeans, FixtureForEveryStageTypeEngineCountHoldAndDeal) {
  on_all_sizes(by_tokens(), [](World& world) {
    for (const int engines : {1, 2, 3}) {
      for (const int stage : {1, 2}) {
        for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
          for (const int held : {0, 1, 2}) {
            SCOPED_TRACE(std::to_string(engines) + " engines, stage " + std::to_string(stage) +
                         ", " + c10::toString(dtype) + ", held " + std::to_string(held));
            step_of_the_fixture(world, {engines, stage, dtype, held});
          }
        }
      }
    }
  });
}

TEST(TokenMeans, ClippingComesAfterTheDivision) {
  on_all_sizes(by_tokens(), [](World& world) {
    auto net = number(world, "net");
    counted_fixture(world, net);
    expect_mean(net.gradient("w").item<double>(), 1e-6);
    const StepResult result = world.step({.clip_norm = 1.0});
    EXPECT_EQ(result.norm, kMean);
    EXPECT_NEAR(value_of(net), -1.0, 1e-6);  // 1 / (97/38 + 1e-6) of 97/38
  });
}

TEST(TokenMeans, AverageDividesByWhatItSays) {
  struct Row {
    Average average;
    double denominator;
  };
  on_all_sizes(patient(), [](World& world) {
    const Row rows[] = {{Average::kRanks, mean_ranks(world)},
                        {Average::kMicroBatches, 4.0},
                        {Average::kTokens, kTokens},
                        {Average::kNone, 1.0}};
    for (const Row& row : rows) {
      SCOPED_TRACE(static_cast<int>(row.average));
      world.set_average(row.average);
      auto net = number(world, "net");
      counted_fixture(world, net);
      const StepResult result = world.step();
      EXPECT_EQ(result.denominator, row.denominator);
      EXPECT_EQ(result.engines[0].denominator, row.denominator);
      EXPECT_EQ(result.engines[0].tokens, 38);  // counted, whatever divides
      EXPECT_EQ(result.norm, kSum / row.denominator);
      EXPECT_NEAR(value_of(net), -kSum / row.denominator, 1e-5);  // 97 is spaced 8e-6
    }
  });
}

TEST(TokenMeans, MultiplierMakesTheMeanFromTheDefaultAverage) {
  on_all_sizes(patient(), [](World& world) {
    const double ranks = mean_ranks(world);
    auto net = number(world, "net");
    backward_of_sums(world, net);
    const double tokens = world.sum(static_cast<double>(tokens_of(world)));
    EXPECT_EQ(tokens, kTokens);
    world.multiply_gradients(ranks / tokens);
    const StepResult result = world.step();
    EXPECT_EQ(result.denominator, ranks);
    EXPECT_EQ(result.engines[0].multiplier, ranks / tokens);
    EXPECT_NEAR(result.norm, kMean, 1e-14);
    expect_mean(-value_of(net), 1e-6);
  });
}

// --- weighted means ---

TEST(TokenMeans, WeightedMeansGiveTheMeanOverAllTokens) {
  using Weight = TokenCount (*)(std::int64_t);
  const Weight weights[] = {[](std::int64_t n) { return TokenCount(n); },
                            [](std::int64_t n) { return TokenCount(torch::tensor(n)); }};
  on_all_sizes(by_tokens(), [&](World& world) {
    for (const Weight weight : weights) {
      auto net = number(world, "net");
      for (const Piece& piece : pieces_of(world)) {
        world.backward(gradient_of(net, piece.gradient), {.weight = weight(piece.tokens)});
      }
      const StepResult result = world.step();
      EXPECT_EQ(result.denominator, kTokens);
      EXPECT_EQ(result.norm, kMean);
      expect_mean(-value_of(net), 1e-6);
    }
  });
}

TEST(TokenMeans, WeightOfAnEngineIsCountedForItOnly) {
  on_ranks(by_tokens(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    a.backward(gradient_of(a, 3), {.weight = 2});
    b.backward(gradient_of(b, 5), {.weight = 7});
    const StepResult result = world.step();
    EXPECT_EQ(result.engines[0].tokens, 2 * world.size());
    EXPECT_EQ(result.engines[1].tokens, 7 * world.size());
    EXPECT_NEAR(value_of(a), -3.0, 1e-6);
    EXPECT_NEAR(value_of(b), -5.0, 1e-6);
  });
}

// The mean over no tokens is 0/0: NaN, and so would NaN * 0 be.
TEST(TokenMeans, WeightZeroOfANanIsExactlyZero) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const bool as_tensor : {false, true}) {
    on_all_sizes(by_tokens(), [&](World& world) {
      auto net = number(world, "net");
      const TokenCount zero = as_tensor ? TokenCount(torch::tensor(0)) : TokenCount(0);
      if (world.rank() == 0) {  // meets the others' first micro-batch
        world.backward(gradient_of(net, nan), {.weight = zero});
      }
      for (const Piece& piece : pieces_of(world)) {
        world.backward(gradient_of(net, piece.gradient), {.weight = piece.tokens});
      }
      EXPECT_EQ(world.step().norm, kMean);
      expect_mean(-value_of(net), 1e-6);

      world.backward(gradient_of(net, nan), {.weight = zero});  // on every rank
      EXPECT_EQ(world.step().reason, StepReason::kEmpty);
      expect_mean(-value_of(net), 1e-6);
    });
  }
}

TEST(TokenMeans, WeightsAreRefusedWhereTheyCannotBeMeant) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    for (const Average average : {Average::kRanks, Average::kMicroBatches, Average::kNone}) {
      world.set_average(average);
      EXPECT_NE(refusal([&] {
                  world.backward(gradient_of(net, 1), {.weight = 2});
                }).find("Average::kTokens"),
                std::string::npos);
      EXPECT_FALSE(refusal([&] { net.backward(gradient_of(net, 1), {.weight = 0}); }).empty());
    }
    world.set_average(Average::kTokens);
    EXPECT_FALSE(refusal([&] { world.backward(gradient_of(net, 1), {.weight = -2}); }).empty());
    EXPECT_FALSE(refusal([&] {
                   world.backward(gradient_of(net, 1), {.weight = torch::tensor(-2)});
                 }).empty());
    EXPECT_EQ(world.window(), 0) << "no pass was run";
  });
}

// --- up front ---

// Powers of two: the scale rounds nothing, not even in fp16, where 60 * 256 is exact.
TEST(TokenMeans, AreTheSameUnderALossScale) {
  WorldOptions options = by_tokens();
  options.loss_scaling.initial = 256.0;
  for (const bool weighted : {false, true}) {
    on_all_sizes(options, [&](World& world) {
      Engine net(world, std::make_shared<Scale>(1, 0.0, at::kHalf),
                 {.name = "net", .optimizer = Sgd{.lr = 1.0}});
      for (const Piece& piece : pieces_of(world)) {
        const at::Tensor mean =
            net.forward(torch::full({1}, piece.gradient, torch::kFloat32)).sum();
        if (weighted) {
          world.backward(world.scale(mean), {.weight = piece.tokens});
        } else {
          world.scale(mean * piece.tokens).backward();
          world.count_tokens(piece.tokens);
        }
      }
      const StepResult result = world.step();
      EXPECT_EQ(result.loss_scale, 256.0);
      EXPECT_EQ(result.denominator, kTokens);
      EXPECT_EQ(result.norm, kMean);
      expect_mean(-net->w.item<double>(), bound_of(at::kHalf));
    });
  }
}

// No round, no byte and no reduction more than without any of it.
TEST(TokenMeans, CostNothingOnTheWire) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    const auto costs = [&](bool arithmetic) {
      world.set_average(arithmetic ? Average::kTokens : Average::kNone);
      const WireReport before = world.wire_report();
      for (int pass = 0; pass < 2; ++pass) {
        const at::Tensor loss = gradient_of(net, 3);
        (arithmetic ? world.scale(loss) : loss).backward();
        if (arithmetic) {
          world.count_tokens(torch::tensor(2));
          world.multiply_gradients(0.5);
        }
      }
      EXPECT_TRUE(world.step().applied);
      const WireReport after = world.wire_report();
      return std::vector<std::int64_t>{
          after.control_rounds - before.control_rounds, after.control_bytes - before.control_bytes,
          after.launches - before.launches, after.reduce_bytes - before.reduce_bytes,
          after.gather_bytes - before.gather_bytes};
    };
    static_cast<void>(costs(false));  // the first pass also settles the order of buckets
    const auto plain = costs(false);
    EXPECT_EQ(costs(true), plain);
    EXPECT_EQ(plain[0], 6);  // a gate and a close for each pass, the step's gate and its norm
    // Pass, half, pass, half: (3 / 4 + 3 / 2) / 4 on each rank, behind 6 of each plain step.
    EXPECT_EQ(value_of(net), -12.0F * static_cast<float>(world.size()) - 0.5625F);
  });
}

// Two terms with denominators of their own reach one engine: sum the counts, divide each term, and
// let the step divide by nothing. The second term has rank + 1 tokens of gradient 2: mean 2.
TEST(TokenMeans, SummedUpFrontForTermsWithDifferentDenominators) {
  on_all_sizes(averaging(Average::kNone), [](World& world) {
    auto net = number(world, "net");
    const std::int64_t others = world.rank() + 1;
    const double first = world.sum(static_cast<double>(tokens_of(world)));
    const double second = world.sum(static_cast<double>(others));
    EXPECT_EQ(first, kTokens);
    EXPECT_EQ(second, world.size() * (world.size() + 1) / 2.0);
    for (const Piece& piece : pieces_of(world)) {
      (gradient_of(net, static_cast<double>(piece.tokens) * piece.gradient) / first).backward();
    }
    (gradient_of(net, 2.0 * static_cast<double>(others)) / second).backward();
    EXPECT_EQ(world.step().denominator, 1.0);
    EXPECT_NEAR(value_of(net), -(kMean + 2.0), 2e-6);  // up to eight terms, each rounded: 5 * 2^-22
  });
}

}  // namespace
}  // namespace tandem::testing
