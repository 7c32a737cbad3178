// tests/integration/multiplier_test.cpp: multiply_gradients(): what is accumulated so far, once, in
// fp32, on every rank; as one process that multiplies p.grad by hand.
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tandem::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// 3, halved, then 5: 6.5; then 2, times -4 and -3/8 in turn: 3.
TEST(Multiplier, IsOfWhatWasAccumulatedAndOfNothingLater) {
  for (const int stage : {1, 2}) {
    for (const auto& [first, second] :
         {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
      for (const bool of_engine : {false, true}) {
        on_ranks(summed(), [&, held = first, held_later = second](World& world) {
          ScaleEngine net = number(world, "net", 0.0, stage);
          const auto multiply = [&](double factor) {
            of_engine ? net.multiply_gradients(factor) : world.multiply_gradients(factor);
          };
          const float sum = ranks_sum(world);
          rank_pass(world, net, 3.0, held);
          multiply(0.5);
          rank_pass(world, net, 5.0, held_later);
          EXPECT_EQ(world.step().engines[0].multiplier, 1.0) << "since the last pass";
          EXPECT_EQ(value_of(net), -6.5F * sum);
          rank_pass(world, net, 2.0, held);
          multiply(-4.0);
          multiply(-0.375);
          const StepResult result = world.step();
          EXPECT_EQ(result.engines[0].multiplier, 1.5);
          EXPECT_EQ(result.norm, 3.0 * sum);
          EXPECT_EQ(result.denominator, 1.0);
          EXPECT_EQ(value_of(net), -9.5F * sum);
        });
      }
    }
  }
}

TEST(Multiplier, CallsOfWorldAndEngineCompose) {
  on_ranks(summed(), [](World& world) {
    ScaleEngine a = number(world, "a");
    ScaleEngine b = number(world, "b");
    const float sum = ranks_sum(world);
    rank_pass(world, a, 4.0);
    world.multiply_gradients(0.5);
    a.multiply_gradients(3.0);
    rank_pass(world, b, 8.0);
    world.multiply_gradients(0.25);
    b.multiply_gradients(-1.0);
    const StepResult result = world.step();
    EXPECT_EQ(value_of(a), -1.5F * sum);
    EXPECT_EQ(value_of(b), 2.0F * sum);
    EXPECT_EQ(result.engines[0].multiplier, 0.25);
    EXPECT_EQ(result.engines[1].multiplier, -0.25);
  });
}

TEST(Multiplier, OfAnEmptyWindowMultipliesNothing) {
  on_ranks(summed(), [](World& world) {
    ScaleEngine a = number(world, "a");
    ScaleEngine b = number(world, "b");
    const float sum = ranks_sum(world);
    world.multiply_gradients(0.5);
    rank_pass(world, a, 4.0);
    world.multiply_gradients(3.0);  // b has nothing yet
    rank_pass(world, b, 4.0);
    world.step();
    EXPECT_EQ(value_of(a), -12.0F * sum);
    EXPECT_EQ(value_of(b), -4.0F * sum);
    world.multiply_gradients(0.5);
    EXPECT_EQ(world.step().reason, StepReason::kEmpty);
    rank_pass(world, a, 4.0);
    world.step();
    EXPECT_EQ(value_of(a), -16.0F * sum);
  });
}

TEST(Multiplier, IsForgottenWithItsWindow) {
  on_ranks(summed(), [](World& world) {
    ScaleEngine a = number(world, "a");
    ScaleEngine b = number(world, "b");
    const float sum = ranks_sum(world);
    rank_pass(world, a, 1.0);
    world.multiply_gradients(0.5);
    world.step();
    rank_pass(world, a, 1.0);
    world.step();
    EXPECT_EQ(value_of(a), -1.5F * sum);
    rank_pass(world, a, 1.0);
    world.multiply_gradients(0.5);
    world.zero_grad();
    rank_pass(world, a, 1.0);
    world.step();
    EXPECT_EQ(value_of(a), -2.5F * sum);
    // An engine that is cleared or stepped alone takes nothing of the others'.
    rank_pass(world, a, 1.0);
    rank_pass(world, b, 1.0);
    world.multiply_gradients(0.5);
    a.zero_grad();
    rank_pass(world, a, 1.0);
    a.multiply_gradients(4.0);
    world.step({.engines = {&a}});
    EXPECT_EQ(value_of(a), -6.5F * sum);
    world.step();
    EXPECT_EQ(value_of(b), -0.5F * sum);
  });
}

// Also what is said after the failed pass where nobody knows of it yet.
TEST(Multiplier, IsForgottenWithAFailedPass) {
  for (const bool told_at_once : {false, true}) {
    on_ranks(summed(), [&](World& world) {
      ScaleEngine net = number(world, "net");
      const auto window = [&](bool fails) {
        rank_pass(world, net, 2.0);
        world.multiply_gradients(0.5);
        const at::Tensor input = torch::full({1}, std::ldexp(4.0F, world.rank())).requires_grad_();
        if (fails && world.rank() + 1 == world.size()) {
          input.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
        }
        const at::Tensor loss = net.forward(input).sum();
        told_at_once ? world.backward(loss) : loss.backward();
        world.multiply_gradients(3.0);
        world.step();
      };
      EXPECT_ANY_THROW(window(true));
      EXPECT_EQ(world.window(), 0);
      window(false);
      EXPECT_EQ(value_of(net), -15.0F * ranks_sum(world));
    });
  }
}

TEST(Multiplier, IsInNormsClipAndGradient) {
  on_ranks(summed(), [](World& world) {
    ScaleEngine a = number(world, "a");
    ScaleEngine b = number(world, "b");
    const float sum = ranks_sum(world);
    rank_pass(world, a, 6.0);
    rank_pass(world, b, -4.0);
    world.multiply_gradients(0.5);
    b.multiply_gradients(-2.0);
    EXPECT_EQ(a.gradient("w").item<float>(), 3.0F * sum);
    EXPECT_EQ(b.gradient("w").item<float>(), 4.0F * sum);
    const StepResult result = world.step({.clip_norm = 2.5 * sum});
    EXPECT_EQ(result.engines[0].norm, 3.0 * sum);
    EXPECT_EQ(result.engines[1].norm, 4.0 * sum);
    EXPECT_EQ(result.norm, 5.0 * sum);
    EXPECT_NEAR(result.clip_factor, 0.5, 1e-6);
    EXPECT_NEAR(value_of(a), -1.5F * sum, 1e-5);
    EXPECT_NEAR(value_of(b), -2.0F * sum, 1e-5);
  });
}

// As torch::optim::AdamW with a gradient of zeros: w (1 - lr weight_decay), and a step that counts.
TEST(Multiplier, ZeroGivesZeroGradientsAndDecays) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 1.0),
               {.name = "net", .optimizer = AdamW{.lr = 0.5, .weight_decay = 0.5}});
    Engine idle(world, std::make_shared<Scale>(1, 1.0),
                {.name = "idle", .optimizer = AdamW{.lr = 0.5, .weight_decay = 0.5}});
    gradient_of(net, 3.0).backward();
    world.multiply_gradients(0.0);
    const StepResult result = world.step();
    EXPECT_TRUE(result.applied);
    EXPECT_EQ(result.norm, 0.0);
    EXPECT_EQ(value_of(net), 0.75F);
    EXPECT_EQ(net.step_count("w"), 1);
    EXPECT_EQ(value_of(idle), 1.0F) << "no pass reached it";
  });
  Scenario scenario = two_engines_in_one_loss();  // AdamW, with decay
  scenario.steps = 6;
  scenario.multiply = [](const Place& place, std::size_t) {
    return place.step % 3 == 1 ? 0.0 : 1.0;
  };
  check(scenario);
}

TEST(Multiplier, RefusesWhatIsNotFiniteAndKeepsTheWindow) {
  on_ranks(summed(), [](World& world) {
    ScaleEngine net = number(world, "net");
    rank_pass(world, net, 1.0);
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity(), -HUGE_VAL}) {
      EXPECT_THAT(refusal([&] { world.multiply_gradients(bad); }), HasSubstr("finite"));
      EXPECT_THAT(refusal([&] { net.multiply_gradients(bad); }), HasSubstr("finite"));
    }
    EXPECT_EQ(world.window(), 1);
    world.step();
    EXPECT_EQ(value_of(net), -ranks_sum(world));
  });
}

TEST(Multiplier, ThatDiffersAtAStepIsAMismatchEverywhereAndKeepsGradients) {
  on_ranks(
      summed(),
      [](World& world) {
        ScaleEngine a = number(world, "a");
        ScaleEngine b = number(world, "b");
        rank_pass(world, a, 1.0);
        rank_pass(world, b, 1.0);
        const bool last = world.rank() + 1 == world.size();
        b.multiply_gradients(last ? 0.25 : 0.5);
        EXPECT_THAT(mismatch([&] { world.step(); }),
                    AllOf(HasSubstr("multiply_gradients"), HasSubstr("rank 0"),
                          HasSubstr("engine 'b', gradients multiplied by 0.5"),
                          HasSubstr("rank " + std::to_string(world.size() - 1)),
                          HasSubstr("engine 'b', gradients multiplied by 0.25"),
                          HasSubstr("gradients are kept")));
        EXPECT_EQ(world.window(), 2);
        EXPECT_TRUE(world.step({.engines = {&a}}).applied) << "b is not stepped";
        if (last) {
          b.multiply_gradients(2.0);
        }
        EXPECT_TRUE(world.step().applied);
        EXPECT_EQ(value_of(a), -ranks_sum(world));
        EXPECT_EQ(value_of(b), -0.5F * ranks_sum(world));
      },
      2);
}

TEST(Multiplier, ThatDiffersAtAPassIsAMismatchEverywhereAndDiscardsWindows) {
  for (const int stage : {1, 2}) {
    on_ranks(
        summed(),
        [&](World& world) {
          ScaleEngine net = number(world, "net", 0.0, stage);
          const bool last = world.rank() + 1 == world.size();
          rank_pass(world, net, 1.0, /*hold=*/true);
          if (last) {
            world.multiply_gradients(0.5);
          }
          EXPECT_THAT(mismatch([&] {
                        rank_pass(world, net, 1.0);
                        world.step();
                      }),
                      AllOf(HasSubstr("multiply_gradients"), HasSubstr("rank 0"),
                            HasSubstr("rank " + std::to_string(world.size() - 1)),
                            HasSubstr("engine 'net', gradients multiplied by 0.5"),
                            HasSubstr("discarded")));
          EXPECT_EQ(world.window(), 0);
          EXPECT_EQ(value_of(net), 0.0F);
          rank_pass(world, net, 1.0);
          EXPECT_TRUE(world.step().applied);
          EXPECT_EQ(value_of(net), -ranks_sum(world));
        },
        2);
  }
}

// The last rank has no data for the second and third pass, and says what the others say: all of it
// before the second pass is over, some of it after, or all after.
TEST(Multiplier, OfARankWithoutDataIsNotAppliedTwice) {
  for (const int stage : {1, 2}) {
    for (const bool hold : {false, true}) {
      for (const int before : {0, 1, 2, 3}) {
        on_ranks(
            summed(),
            [&](World& world) {
              ScaleEngine net = number(world, "net", 0.0, stage);
              const double factors[] = {0.5, 0.25, -3.0};
              rank_pass(world, net, 16.0, hold);
              if (world.rank() + 1 < world.size()) {
                for (const double factor : {factors[0], factors[1]}) {
                  world.multiply_gradients(factor);
                  rank_pass(world, net, 16.0, hold);
                }
                EXPECT_EQ(world.sum(1.0), world.size());
                world.multiply_gradients(factors[2]);
              } else {
                for (int i = 0; i < before; ++i) {
                  world.multiply_gradients(factors[i]);
                }
                EXPECT_EQ(world.sum(1.0), world.size());  // joins both passes
                for (int i = before; i < 3; ++i) {
                  world.multiply_gradients(factors[i]);
                }
              }
              const StepResult result = world.step();
              EXPECT_EQ(result.engines[0].multiplier, -3.0);
              // ((16 all / 2 + 16 others) / 4 + 16 others) times -3, downhill
              const float all = ranks_sum(world);
              const float others = std::ldexp(1.0F, world.size() - 1) - 1.0F;
              EXPECT_EQ(value_of(net), 3.0F * (2.0F * all + 20.0F * others));
            },
            2);
      }
    }
  }
}

// SGD: AdamW would hide a factor.
TEST(Multiplier, EqualsOneProcessThatMultipliesByHand) {
  int variant = 0;
  for (const Scenario& loop :
       {one_engine(), two_engines_in_one_loss(), three_engines_in_one_loss()}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int micro_batches : {1, 2, 4}) {
        for (const int way : {0, 1, 2}) {  // stage 2, stage 1, stage 1 and held
          SCOPED_TRACE(std::to_string(loop.engines.size()) + " engines, " + toString(dtype) + ", " +
                       std::to_string(micro_batches) + " micro-batches, way " +
                       std::to_string(way));
          Scenario scenario = with_micro_batches(with_sgd(loop, 0.5, 0.9), micro_batches);
          scenario.steps = 4;
          scenario = multiplied(way == 2 ? held(scenario) : with_stage(scenario, 2 - way));
          if (dtype != at::kFloat) {
            scenario.one_graph = false;  // its losses' factors would be rounded to 16 bits
            scenario = in_type(scenario, dtype,
                               loop.engines.size() == 1 ? std::vector<std::size_t>{0}
                                                        : std::vector<std::size_t>{0, 1});
          }
          if (variant % 2 == 1) {
            scenario = with_bucket_bytes(scenario, 1);
          }
          if (variant % 4 > 1) {
            scenario.clip_norm = 0.05;
          }
          ++variant;
          check(scenario);
        }
      }
    }
  }
}

TEST(Multiplier, OfEachEngineItsOwn) {
  for (const bool hold : {false, true}) {
    Scenario scenario = with_micro_batches(chained(), 3);
    scenario.multiply = factor_after;
    scenario.one_graph = false;
    scenario.steps = 4;
    check(hold ? held(scenario) : scenario);
  }
}

TEST(Multiplier, OnUnevenRanks) {
  for (const bool hold : {false, true}) {
    for (const int fewer : {1, 3}) {
      Scenario scenario = multiplied(two_engines_in_one_loss());
      scenario.passes = [fewer](int, int rank, int world_size) {
        return rank + 1 < world_size ? 3 : 3 - fewer;
      };
      scenario.steps = 4;
      check(hold ? held(scenario) : scenario, 2);
    }
  }
}

TEST(Multiplier, WithTwoBackwardsInAMicroBatch) {
  check(multiplied(with_micro_batches(two_losses(), 2)));
}

// Said in the middle of the window, and at its end.
TEST(Multiplier, KeepsTheBitsOfAnyNumberOfRanks) {
  Scenario scenario = dealt(two_engines_in_one_loss());
  scenario.passes = [](int, int, int world_size) { return 24 / world_size; };
  scenario.multiply = [](const Place& place, std::size_t) {
    const int dealt = (place.pass + 1) * place.world_size;
    return dealt == 12 ? 1.0 / 3.0 : dealt == 24 ? 5.0 : 1.0;
  };
  expect_same_bits(scenario);
}

}  // namespace
}  // namespace tandem::testing
