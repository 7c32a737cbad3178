// tests/integration/tokens_test.cpp: how tokens are counted: by what, for which engines and
// windows, none at all, and what is refused.
#include "tests/support/nodes.h"
#include "tests/support/token_fixture.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

namespace tandem::testing {
namespace {

TEST(Tokens, AreCountedAsIntegersAndTensors) {
  const std::function<void(World&, std::int64_t)> ways[] = {
      [](World& world, std::int64_t n) { world.count_tokens(static_cast<std::uint8_t>(n)); },
      [](World& world, std::int64_t n) { world.count_tokens(torch::tensor(n, torch::kLong)); },
      [](World& world, std::int64_t n) {
        world.count_tokens(torch::full({1, 1}, n, torch::kInt));
      },
      [](World& world, std::int64_t n) {
        world.count_tokens(torch::ones({n}, torch::kBool).sum());
      },
      [](World& world, std::int64_t n) {  // the value at the call counts
        at::Tensor count = torch::tensor(n, torch::kLong);
        world.count_tokens(count);
        count.fill_(1000);
      },
      [](World& world, std::int64_t n) {  // calls add up
        world.count_tokens(n - 1);
        world.count_tokens(torch::tensor(1));
        world.count_tokens(torch::tensor(0));
      }};
  on_ranks(by_tokens(), [&](World& world) {
    for (const auto& count : ways) {
      auto net = number(world, "net");
      for (const Piece& piece : pieces_of(world)) {
        gradient_of(net, static_cast<double>(piece.tokens) * piece.gradient).backward();
        count(world, piece.tokens);
      }
      EXPECT_EQ(world.step().denominator, kTokens);
      expect_mean(-value_of(net), 1e-6);
    }
  });
}

TEST(Tokens, EnginesOfOneStepHaveTheirOwnDenominators) {
  on_ranks(by_tokens(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    auto c = number(world, "c");
    (gradient_of(a, 12) + gradient_of(b, 12) + gradient_of(c, 12)).backward();
    world.count_tokens(2);
    a.count_tokens(torch::tensor(1));
    b.count_tokens(4);
    const StepResult result = world.step();  // each rank counts the same: the ratios stay
    const double ranks = world.size();
    EXPECT_EQ(result.denominator, 0.0) << "not one for all";
    EXPECT_EQ(result.engines[0].denominator, 3.0 * ranks);
    EXPECT_EQ(result.engines[1].denominator, 6.0 * ranks);
    EXPECT_EQ(result.engines[2].denominator, 2.0 * ranks);
    EXPECT_NEAR(value_of(a), -4.0, 1e-6);
    EXPECT_NEAR(value_of(b), -2.0, 1e-6);
    EXPECT_NEAR(value_of(c), -6.0, 1e-6);
  });
}

TEST(Tokens, CountsEndWithTheWindow) {
  on_ranks(by_tokens(), [](World& world) {
    auto net = number(world, "net");
    for (int update = 1; update <= 2; ++update) {
      gradient_of(net, 6).backward();
      world.count_tokens(1000);
      world.zero_grad();
      gradient_of(net, 6).backward();
      world.count_tokens(2);
      EXPECT_EQ(world.step().denominator, 2.0 * world.size());
      EXPECT_EQ(value_of(net), -3.0F * static_cast<float>(update));
    }
  });
}

// The retry counts again. What the failing call itself would have counted is not counted either.
TEST(Tokens, CountsOfAFailedWindowAreDropped) {
  on_ranks(by_tokens(), [](World& world) {
    auto first = number(world, "first", 1.0);
    auto second = number(world, "second", 1.0);
    (gradient_of(first, 6) + gradient_of(second, 6)).backward();
    world.count_tokens(1000);
    const std::function<void()> fail = [&] {
      if (world.rank() == 0) {
        throw std::runtime_error("on purpose");
      }
    };
    // The second's gradient has arrived when the first's fails.
    const at::Tensor loss =
        second.forward(intercepted(first.forward(torch::ones({1})), fail)).sum();
    EXPECT_THROW(world.backward(loss, {.weight = 500}), std::runtime_error);
    EXPECT_EQ(world.window(), 0);
    (gradient_of(first, 6) + gradient_of(second, 6)).backward();
    world.count_tokens(2);
    EXPECT_EQ(world.step().denominator, 2.0 * world.size());
    EXPECT_EQ(value_of(first), -2.0F);
    EXPECT_EQ(value_of(second), -2.0F);
  });
}

// Behind a plain backward() the other ranks count before they learn of the failure: what they
// counted went with that pass, and the retry counts it again.
TEST(Tokens, CountsBehindAPassThatFailedElsewhereAreDropped) {
  for (const bool as_tensor : {false, true}) {
    on_ranks(
        by_tokens(),
        [&](World& world) {
          auto first = number(world, "first", 1.0);
          auto second = number(world, "second", 1.0);
          const std::function<void()> fail = [&] {
            if (world.rank() == 0) {
              throw std::runtime_error("on purpose");
            }
          };
          const at::Tensor loss =
              second.forward(intercepted(first.forward(torch::ones({1})), fail)).sum();
          if (world.rank() == 0) {
            EXPECT_THROW(loss.backward(), std::runtime_error);
          } else {
            loss.backward();
            world.count_tokens(as_tensor ? TokenCount(torch::tensor(1000)) : TokenCount(1000));
            EXPECT_THROW(world.step(), BackwardFailed);
          }
          (gradient_of(first, 6) + gradient_of(second, 6)).backward();
          world.count_tokens(2);
          EXPECT_EQ(world.step().denominator, 2.0 * world.size());
          EXPECT_EQ(value_of(first), -2.0F);
          EXPECT_EQ(value_of(second), -2.0F);
        },
        2);
  }
}

TEST(Tokens, BadCountsAreRefusedAtOnceAndCountNothing) {
  on_ranks(by_tokens(), [](World& world) {
    auto net = number(world, "net");
    gradient_of(net, 6).backward();
    EXPECT_NE(refusal([&] { world.count_tokens(-1); }).find("-1 tokens"), std::string::npos);
    EXPECT_FALSE(
        refusal([&] { world.count_tokens(std::numeric_limits<std::uint64_t>::max()); }).empty());
    EXPECT_FALSE(refusal([&] { net.count_tokens(torch::tensor(1.5)); }).empty());
    EXPECT_FALSE(refusal([&] { net.count_tokens(torch::tensor({1, 2})); }).empty());
    EXPECT_FALSE(refusal([&] { net.count_tokens(at::Tensor()); }).empty());
    world.count_tokens(2);
    EXPECT_EQ(world.step().denominator, 2.0 * world.size());
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

// A tensor is read by the step only: its windows are discarded on all ranks, as of any rank that
// cannot go on. So it is where a positive count would hide the negative one in the sum.
TEST(Tokens, NegativeTensorIsRefusedByTheStepOnAllRanks) {
  on_ranks(by_tokens(), [](World& world) {
    auto net = number(world, "net");
    const bool bad = world.rank() == world.size() - 1;
    for (const std::int64_t other : {0, 100}) {
      gradient_of(net, 6).backward();
      world.count_tokens(torch::tensor(bad ? -3 : 3));
      world.count_tokens(torch::tensor(other));
      const std::string error = refusal([&] { world.step(); });
      EXPECT_NE(error.find("rank " + std::to_string(world.size() - 1)), std::string::npos) << error;
      EXPECT_NE(error.find("-3 tokens"), std::string::npos) << error;
      EXPECT_NE(error.find("discarded"), std::string::npos) << error;
      EXPECT_EQ(world.window(), 0);
      EXPECT_EQ(value_of(net), 0.0F);
    }
    gradient_of(net, 6).backward();
    world.count_tokens(2);
    EXPECT_EQ(world.step().denominator, 2.0 * world.size());
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

TEST(Tokens, RankWithoutTokensContributesZero) {
  for (const bool runs : {true, false}) {  // a pass of its own, or none
    on_ranks(
        by_tokens(),
        [&](World& world) {
          auto net = number(world, "net");
          const bool empty = world.rank() == 0;
          if (!empty || runs) {
            gradient_of(net, empty ? 0 : 6).backward();
            world.count_tokens(empty ? 0 : 2);
          }
          EXPECT_EQ(world.step().denominator, 2.0 * (world.size() - 1));
          EXPECT_EQ(value_of(net), -3.0F);
        },
        2);
  }
}

TEST(Tokens, NoneAtAllSkipTheStepAsEmpty) {
  on_ranks(by_tokens(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 1.0),
               {.name = "net", .optimizer = AdamW{.lr = 0.1}});
    net.forward(torch::ones({1})).sum().backward();
    world.count_tokens(0);
    const StepResult result = world.step();
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.reason, StepReason::kEmpty);
    EXPECT_EQ(result.engines[0].denominator, 0.0);
    EXPECT_EQ(net->w.item<float>(), 1.0F) << "not decayed either";
    EXPECT_EQ(net.step_count("w"), 0);
    EXPECT_EQ(world.window(), 0);
  });
}

TEST(Tokens, NoneForOneEngineLeaveItAlone) {
  on_ranks(by_tokens(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    (gradient_of(a, 6) + gradient_of(b, 6)).backward();
    a.count_tokens(2);
    b.count_tokens(0);
    const StepResult result = world.step();
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(result.denominator, 2.0 * world.size());
    EXPECT_EQ(result.norm, 3.0);
    EXPECT_EQ(value_of(a), -3.0F);
    EXPECT_EQ(value_of(b), 0.0F);
    EXPECT_EQ(b.step_count("w"), 0);
  });
}

// Gradients and multipliers are kept: count, and step again.
TEST(Tokens, NeverCountedIsAnErrorOnAllRanks) {
  on_ranks(by_tokens(), [](World& world) {
    auto net = number(world, "net");
    gradient_of(net, 12).backward();
    world.multiply_gradients(0.5);
    for (int attempt = 0; attempt < 2; ++attempt) {
      const std::string error = refusal([&] { world.step(); });
      EXPECT_NE(error.find("no rank counted any for engine 'net'"), std::string::npos) << error;
      EXPECT_EQ(value_of(net), 0.0F);
    }
    EXPECT_EQ(world.window(), 1);
    if (world.rank() == 0) {  // one rank is enough
      world.count_tokens(2 * world.size());
    }
    EXPECT_EQ(world.step().denominator, 2.0 * world.size());
    EXPECT_EQ(value_of(net), -3.0F);
  });
}

}  // namespace
}  // namespace tandem::testing
