// tests/integration/gradient_test.cpp: Engine::gradient(): the whole fp32 gradient of a parameter
// as a step would apply it, without changing what the step applies.
#include "tests/support/keyed.h"
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// All gradients, engine by engine, in the order of unique_parameters().
std::vector<at::Tensor> gradients_of(Trainer& trainer) {
  std::vector<at::Tensor> gradients;
  for (std::size_t net = 0; net < trainer.nets().size(); ++net) {
    for (const NamedTensor& parameter : trainer.nets()[net].parameters()) {
      gradients.push_back(trainer.engine(net).gradient(parameter.name));
      if (gradients.back().defined()) {
        EXPECT_EQ(gradients.back().scalar_type(), at::kFloat);
        EXPECT_EQ(gradients.back().sizes(), parameter.tensor.sizes());
        EXPECT_EQ(gradients.back().device(), parameter.tensor.device());
      }
    }
  }
  return gradients;
}

/// Of two steps: rank 0 computes what they are, every rank holds rank 0's bits.
void expect_gradients(World& world, const Scenario& scenario) {
  Trainer trainer(world, scenario);
  const auto oracle = world.rank() == 0 ? split_oracle(scenario, world.size()) : nullptr;
  for (int index = 0; index < 2; ++index) {
    trainer.passes(index);
    const std::vector<at::Tensor> found = gradients_of(trainer);
    double sum = 0.0;
    for (const at::Tensor& gradient : found) {
      sum += gradient.defined() ? gradient.to(at::kDouble).sum().item<double>() : 1.0;
    }
    EXPECT_EQ(world.broadcast(sum), sum) << "ranks differ";
    if (oracle) {
      oracle->adopt(copies(trainer.parameters()));
      const std::vector<at::Tensor> expected = oracle->applied_gradients(index);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(found[i].defined(), expected[i].defined()) << "parameter " << i;
        if (!expected[i].defined()) {
          continue;
        }
        const at::Tensor value = found[i].cpu().to(at::kDouble);
        if (scenario.bitwise) {
          // The factor is rounded to fp32, and its product with the sum: 2^-24 each. What is
          // denormal there is rounded to multiples of 2^-149.
          EXPECT_TRUE(at::allclose(value, expected[i], 0x1p-22, 0x1p-149)) << "parameter " << i;
        } else {  // a sum in another order
          EXPECT_LE(distance({value}, {expected[i]}, {expected[i]}), 1e-6) << "parameter " << i;
        }
      }
    }
    world.step();
  }
}

TEST(Gradient, IsWhatOneProcessWouldApply) {
  int variant = 0;
  for (const Scenario& loop :
       {one_engine(), two_engines_in_one_loss(), three_engines_in_one_loss()}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int micro_batches : {1, 2, 4}) {
        for (const int way : {0, 1, 2}) {  // stage 2, stage 1, stage 1 and held
          for (const bool multiply : {false, true}) {
            SCOPED_TRACE(std::to_string(loop.engines.size()) + " engines, " + toString(dtype) +
                         ", " + std::to_string(micro_batches) + " micro-batches, way " +
                         std::to_string(way) + (multiply ? ", multiplied" : ""));
            Scenario scenario = with_micro_batches(loop, micro_batches);
            scenario = way == 2 ? held(scenario) : with_stage(scenario, 2 - way);
            scenario = multiply ? multiplied(scenario) : scenario;
            if (dtype != at::kFloat) {
              scenario = in_type(scenario, dtype,
                                 loop.engines.size() == 1 ? std::vector<std::size_t>{0}
                                                          : std::vector<std::size_t>{0, 1});
            }
            if (variant % 2 == 1) {
              scenario = with_bucket_bytes(scenario, 1);
            }
            if (variant % 4 > 1) {
              scenario.loss_scale = 256.0;
            }
            ++variant;
            on_ranks(options_for(scenario),
                     [&](World& world) { expect_gradients(world, scenario); });
          }
        }
      }
    }
  }
}

TEST(Gradient, IsAveragedAsTheWorldSays) {
  for (const Average average :
       {Average::kRanks, Average::kMicroBatches, Average::kTokens, Average::kNone}) {
    Scenario scenario = multiplied(with_micro_batches(two_engines_in_one_loss(), 3));
    scenario.average = average;
    scenario.tokens = [](const Place& place) { return 3 + place.micro_batch() % 4; };
    scenario.passes = [](int, int rank, int world_size) {  // uneven
      return rank + 1 < world_size ? 3 : 2;
    };
    on_ranks(options_for(scenario), [&](World& world) { expect_gradients(world, scenario); });
  }
}

TEST(Gradient, OfWhatSomeRanksOrNoneReached) {
  for (const Scenario& scenario :
       {unused_parameter(), engine_absent_everywhere(), engine_absent_on_some_ranks()}) {
    on_ranks(options_for(scenario), [&](World& world) { expect_gradients(world, scenario); });
  }
}

TEST(Gradient, IsUndefinedWhereNothingIsAccumulated) {
  on_ranks(patient(), [](World& world) {
    auto a = number(world, "a");
    auto b = number(world, "b");
    EXPECT_FALSE(a.gradient("w").defined());
    gradient_of(a, 3.0).backward();
    EXPECT_EQ(a.gradient("w").item<float>(), 3.0F);
    EXPECT_FALSE(b.gradient("w").defined());
    world.step();
    EXPECT_FALSE(a.gradient("w").defined());
    gradient_of(a, 3.0).backward();
    world.zero_grad();
    EXPECT_FALSE(a.gradient("w").defined());
  });
}

TEST(Gradient, RefusesUnknownNames) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    gradient_of(net, 3.0).backward();
    EXPECT_THAT(refusal([&] { static_cast<void>(net.gradient("bias")); }),
                AllOf(HasSubstr("net"), HasSubstr("bias")));
    EXPECT_EQ(world.window(), 1);
    EXPECT_EQ(net.gradient("w").item<float>(), 3.0F);
  });
}

// Tensors of other sizes than what travels at once (256 KiB from a rank): of 2 MB, so that each of
// four ranks gives more than one piece; of one element, and none.
TEST(Gradient, OfEverySize) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    on_ranks(summed(), [&](World& world) {
      const auto parameter = [&](at::IntArrayRef shape) {
        return torch::zeros(shape, at::TensorOptions(dtype).device(test_device())).requires_grad_();
      };
      const at::Tensor large = parameter({500, 1001});
      const at::Tensor scalar = parameter({});
      const at::Tensor empty = parameter({0, 3});
      Engine net(world, NamedTensors{{"large", large}, {"empty", empty}, {"scalar", scalar}},
                 {.name = "net", .optimizer = Sgd{.lr = 1.0}});
      // Whole numbers below 2^7: exact in 16 bits, and so are their sums.
      const at::Tensor values = torch::round(keyed(large.sizes(), 7, 100.0)).to(test_device());
      (large.to(at::kFloat) * values).sum().backward();
      (scalar.to(at::kFloat) * 5.0 + empty.to(at::kFloat).sum()).backward();
      const float ranks = static_cast<float>(world.size());
      EXPECT_TRUE(at::equal(net.gradient("large"), values * ranks));
      EXPECT_EQ(net.gradient("scalar").item<float>(), 5.0F * ranks);
      EXPECT_EQ(net.gradient("scalar").dim(), 0);
      EXPECT_EQ(net.gradient("empty").sizes(), empty.sizes());
      EXPECT_TRUE(world.step().applied);
      EXPECT_EQ(scalar.item<float>(), -5.0F * ranks);
    });
  }
}

// Asked for before each step, and in the middle of windows: the same bits as without.
TEST(Gradient, ChangesNothingOfTheStep) {
  for (const bool hold : {false, true}) {
    for (const std::optional<double> loss_scale : {std::optional<double>(), {1024.0}}) {
      Scenario scenario =
          multiplied(with_micro_batches(in_bf16(two_engines_in_one_loss(), {1}), 3));
      scenario = hold ? held(scenario) : scenario;
      scenario.loss_scale = loss_scale;
      scenario.clip_norm = 0.1;
      scenario.steps = 4;
      on_ranks(options_for(scenario), [&](World& world) {
        const std::uint64_t expected = trained_hash(world, scenario);
        Trainer trainer(world, scenario);
        for (int index = 0; index < scenario.steps; ++index) {
          trainer.passes(index);
          gradients_of(trainer);
          gradients_of(trainer);
          world.step({.clip_norm = scenario.clip_norm});
        }
        EXPECT_EQ(world.parameter_hash(), expected);
      });
    }
  }
  on_ranks(summed(), [](World& world) {
    auto net = number(world, "net", 0.0, 1);
    for (const double gradient : {1.0, 2.0, 4.0}) {
      rank_pass(world, net, gradient, /*hold=*/true);
      world.multiply_gradients(0.5);
      static_cast<void>(net.gradient("w"));
    }
    // 1/8 + 2/4 + 4/2
    EXPECT_EQ(net.gradient("w").item<float>(), 2.625F * ranks_sum(world));
    world.step();
    EXPECT_EQ(value_of(net), -2.625F * ranks_sum(world));
  });
}

TEST(Gradient, CountsRanksThatAreAtTheirStepOrHaveLeft) {
  on_ranks(
      summed(),
      [](World& world) {
        auto net = number(world, "net", 0.0, 1);
        rank_pass(world, net, 1.0, /*hold=*/true);
        world.multiply_gradients(0.5);
        if (world.rank() > 0) {
          EXPECT_TRUE(world.step().applied);
        } else {
          EXPECT_EQ(net.gradient("w").item<float>(), 0.5F * ranks_sum(world));
          world.step();
        }
        EXPECT_EQ(value_of(net), -0.5F * ranks_sum(world));
        rank_pass(world, net, 1.0);
        if (world.rank() > 0) {
          world.leave();
        } else {
          EXPECT_EQ(net.gradient("w").item<float>(), ranks_sum(world));
        }
      },
      2);
}

TEST(Gradient, ThatDiffersIsAMismatchEverywhere) {
  on_ranks(
      summed(),
      [](World& world) {
        auto a = number(world, "a");
        auto b = number(world, "b");
        rank_pass(world, a, 1.0);
        const bool last = world.rank() + 1 == world.size();
        EXPECT_THAT(mismatch([&] { static_cast<void>((last ? b : a).gradient("w")); }),
                    AllOf(HasSubstr("gradient of engine 'a', parameter 'w'"),
                          HasSubstr("gradient of engine 'b', parameter 'w'")));
        if (last) {
          a.multiply_gradients(3.0);
        }
        EXPECT_THAT(mismatch([&] { static_cast<void>(a.gradient("w")); }),
                    AllOf(HasSubstr("multiply_gradients"), HasSubstr("multiplied by 3"),
                          HasSubstr("gradients are kept")));
        if (!last) {
          a.multiply_gradients(3.0);
        }
        EXPECT_EQ(a.gradient("w").item<float>(), 3.0F * ranks_sum(world));
        world.step();
        EXPECT_EQ(value_of(a), -3.0F * ranks_sum(world));
      },
      2);
}

TEST(Gradient, NeedsTokensWhereTheyAreTheDivisor) {
  WorldOptions options = patient();
  options.average = Average::kTokens;
  on_ranks(options, [](World& world) {
    auto net = number(world, "net");
    rank_pass(world, net, 1.0);
    EXPECT_THAT(refusal([&] { static_cast<void>(net.gradient("w")); }),
                AllOf(HasSubstr("gradient"), HasSubstr("count_tokens"), HasSubstr("'net'")));
    EXPECT_EQ(world.window(), 1);
    world.count_tokens(0);
    EXPECT_FALSE(net.gradient("w").defined()) << "counted, and none";
    world.count_tokens(torch::tensor(world.rank() == 0 ? 4 : 0));
    EXPECT_EQ(net.gradient("w").item<float>(), 0.25F * ranks_sum(world));
    const StepResult result = world.step();
    EXPECT_EQ(result.denominator, 4.0);
    EXPECT_EQ(value_of(net), -0.25F * ranks_sum(world));
  });
}

}  // namespace
}  // namespace tandem::testing
