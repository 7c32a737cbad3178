// tests/integration/accumulation_test.cpp: GradientAccumulation: which micro-batch is a boundary,
// and that what is stepped there is what one process makes of the whole batch.
#include "tests/support/keyed.h"
#include "tests/support/number.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"
#include <tandem/tandem.h>

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <iterator>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

/// What the loop over an epoch of `range` says: 'B' at a boundary, '.' elsewhere.
template <class Range>
std::string boundaries(GradientAccumulation& accumulation, Range&& range) {
  std::string marks;
  for (auto&& element : accumulation.epoch(std::forward<Range>(range))) {
    static_cast<void>(element);
    marks += accumulation.boundary() ? 'B' : '.';
  }
  return marks;
}

TEST(Accumulation, EveryFourthAndTheEpochsLastAreBoundaries) {
  on_ranks(patient(), [](World& world) {
    GradientAccumulation accumulation(world, {.steps = 4});
    EXPECT_FALSE(accumulation.boundary());
    EXPECT_EQ(boundaries(accumulation, std::vector<int>(10)), "...B...B.B");
    EXPECT_EQ(boundaries(accumulation, std::vector<int>(8)), "...B...B");
    EXPECT_EQ(boundaries(accumulation, std::vector<int>(3)), "..B");
    EXPECT_EQ(boundaries(accumulation, std::vector<int>()), "");
    GradientAccumulation every(world, {.steps = 1});
    EXPECT_EQ(boundaries(every, std::vector<int>(3)), "BBB");
  });
}

TEST(Accumulation, EpochLeftEarlyIsForgotten) {
  on_ranks(patient(), [](World& world) {
    GradientAccumulation accumulation(world, {.steps = 4});
    const std::vector<int> six(6);
    int turns = 0;
    for ([[maybe_unused]] const int& element : accumulation.epoch(six)) {
      if (++turns == 2) {
        break;
      }
    }
    EXPECT_EQ(boundaries(accumulation, six), "...B.B");
  });
}

TEST(Accumulation, ByHand) {
  on_ranks(patient(), [](World& world) {
    GradientAccumulation accumulation(world, {.steps = 3});
    std::string marks;
    for (int i = 0; i < 5; ++i) {
      accumulation.begin({.last_of_epoch = i == 4});
      marks += accumulation.boundary() ? 'B' : std::to_string(accumulation.micro_batches())[0];
      EXPECT_EQ(accumulation.joint_micro_batches(), accumulation.micro_batches() * world.size());
    }
    EXPECT_EQ(marks, "12B1B");
    accumulation.begin();
    accumulation.restart();
    accumulation.begin();
    EXPECT_EQ(accumulation.micro_batches(), 1);
  });
}

/// As LibTorch's DataLoader: one pass, an iterator that is dereferenced into what the next
/// increment overwrites, and elements that cannot be copied.
class Loader {
 public:
  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = std::unique_ptr<int>;
    using difference_type = std::ptrdiff_t;
    using pointer = value_type*;
    using reference = value_type&;
    Iterator(Loader* loader, int place) : loader_(loader), place_(place) {}
    reference operator*() { return loader_->current_; }
    Iterator& operator++() {
      loader_->current_ = std::make_unique<int>(++place_);
      return *this;
    }
    bool operator!=(const Iterator& other) const { return place_ != other.place_; }

   private:
    Loader* loader_;
    int place_;
  };
  Iterator begin() { return {this, 0}; }
  Iterator end() { return {this, 5}; }

 private:
  std::unique_ptr<int> current_ = std::make_unique<int>(0);
};

TEST(Accumulation, SinglePassLoaderWithOneElementAhead) {
  on_ranks(patient(), [](World& world) {
    GradientAccumulation accumulation(world, {.steps = 2});
    Loader loader;
    std::vector<int> seen;
    std::string marks;
    for (std::unique_ptr<int>& element : accumulation.epoch(loader)) {
      seen.push_back(*element);
      marks += accumulation.boundary() ? 'B' : '.';
    }
    EXPECT_EQ(seen, (std::vector<int>{0, 1, 2, 3, 4}));
    EXPECT_EQ(marks, ".B.BB");
  });
}

TEST(Accumulation, ElementsOfAContainerAreItsOwn) {
  on_ranks(patient(), [](World& world) {
    GradientAccumulation accumulation(world, {.steps = 2});
    std::vector<std::unique_ptr<int>> elements(3);
    for (std::unique_ptr<int>& element : accumulation.epoch(elements)) {
      element = std::make_unique<int>(7);
    }
    for (const std::unique_ptr<int>& element : elements) {
      EXPECT_EQ(*element, 7);
    }
  });
}

TEST(Accumulation, RefusesWindowsWithoutMicroBatches) {
  on_ranks(patient(), [](World& world) {
    for (const std::int64_t steps : {0, -3}) {
      EXPECT_NE(refusal([&] {
                  GradientAccumulation(world, {.steps = steps});
                }).find("steps is " + std::to_string(steps)),
                std::string::npos);
    }
  });
}

TEST(Accumulation, AveragesByMicroBatchesUnlessByTokensOrNot) {
  for (const auto& [given, expected] :
       {std::pair{Average::kRanks, Average::kMicroBatches},
        std::pair{Average::kMicroBatches, Average::kMicroBatches},
        std::pair{Average::kTokens, Average::kTokens}, std::pair{Average::kNone, Average::kNone}}) {
    WorldOptions options = patient();
    options.average = given;
    on_ranks(options, [&, wanted = expected](World& world) {
      GradientAccumulation accumulation(world, {.steps = 2});
      EXPECT_EQ(world.average(), wanted);
    });
  }
}

TEST(Accumulation, RefusesAWindowThatHoldsGradientsOfAnotherAverage) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    gradient_of(net, 1.0).backward();
    EXPECT_NE(refusal([&] { GradientAccumulation(world, {.steps = 2}); }).find("'net'"),
              std::string::npos);
    world.step();
    EXPECT_NO_THROW(GradientAccumulation(world, {.steps = 2}));
  });
}

// --- what is stepped ---

/// `epochs` of `micro_batches` on each rank, in windows of `steps`.
struct Plan {
  int epochs = 0;
  int micro_batches = 0;
  AccumulationOptions options;

  [[nodiscard]] int windows() const {
    const auto steps = static_cast<int>(options.steps);
    return (micro_batches + steps - 1) / steps;
  }
};

/// The scenario as the oracles see it: one step a window.
Scenario in_windows(Scenario scenario, const Plan& plan) {
  scenario.average = Average::kMicroBatches;
  scenario.steps = plan.epochs * plan.windows();
  scenario.passes = [plan](int step, int, int) {
    const auto steps = static_cast<int>(plan.options.steps);
    return std::min(steps, plan.micro_batches - step % plan.windows() * steps);
  };
  return scenario;
}

void expect_as_one_process(World& world, const Scenario& plain, const Plan& plan) {
  const Scenario scenario = in_windows(plain, plan);
  Trainer trainer(world, scenario);
  const std::vector<at::Tensor> start = copies(trainer.parameters());
  const bool in_16_bits = start[0].element_size() == 2;
  const auto split = split_oracle(scenario, world.size());
  const auto whole = whole_oracle(scenario, world.size());
  GradientAccumulation accumulation(world, plan.options);
  std::vector<int> micro_batches(static_cast<std::size_t>(plan.micro_batches));
  int window = 0;
  int pass = 0;
  for (int epoch = 0; epoch < plan.epochs; ++epoch) {
    for ([[maybe_unused]] const int& element : accumulation.epoch(micro_batches)) {
      const Place place{window, pass++, world.rank(), world.size()};
      for (const at::Tensor& loss : scenario.losses(trainer.nets(), place)) {
        loss.backward();
      }
      if (accumulation.boundary()) {
        const StepResult result = world.step();
        EXPECT_TRUE(result.applied);
        EXPECT_EQ(result.denominator, static_cast<double>(pass) * world.size());
        split->step(window, 1.0);
        whole->step(window, 1.0);
        ++window;
        pass = 0;
      }
    }
  }
  EXPECT_EQ(window, scenario.steps);
  EXPECT_EQ(world.updates(), scenario.steps);
  if (!in_16_bits) {  // bf16 differs by single roundings, and then in all later gradients
    EXPECT_LE(distance(trainer.parameters(), split->parameters(), start), 1e-6);
  }
  EXPECT_LE(
      distance(trainer.parameters(), whole->parameters(), difference(whole->parameters(), start)),
      in_16_bits ? 5e-2 : 1e-5);
}

TEST(Accumulation, EqualsOneProcessOnTheWholeBatch) {
  const std::vector<Scenario> scenarios{with_sgd(one_engine(), 0.5),
                                        with_sgd(two_engines_in_one_loss(), 0.5, 0.9),
                                        in_bf16(with_sgd(one_engine(), 0.5), {0}),
                                        in_bf16(with_sgd(two_engines_in_one_loss(), 0.5), {0, 1})};
  for (const Scenario& scenario : scenarios) {
    for (const std::int64_t steps : {1, 2, 4}) {
      for (const bool hold : {false, true}) {
        SCOPED_TRACE("steps " + std::to_string(steps) + (hold ? ", held" : ""));
        const Plan plan{.epochs = 3, .micro_batches = 5, .options = {.steps = steps, .hold = hold}};
        on_ranks(patient(), [&](World& world) {
          expect_as_one_process(world, hold ? with_stage(scenario, 1) : scenario, plan);
        });
      }
    }
  }
}

/// The mean loss over rows of the batch that one process trains on.
at::Tensor loss_of(const at::Tensor& prediction) { return (prediction - 1.0).square().mean(); }

// Sgd: with AdamW a factor on the gradient would not show. Micro-batches of 16 rows, two of them on
// each rank, against one process that steps torch::optim::SGD on all rows at once.
TEST(Accumulation, TwoOfSixteenAreOneOfThirtyTwo) {
  on_ranks(patient(), [](World& world) {
    const auto oracle = std::make_shared<Mlp>(8, 16, 8, 1);
    torch::optim::SGD sgd(oracle->parameters(), torch::optim::SGDOptions(0.5));
    Engine net(world, std::make_shared<Mlp>(8, 16, 8, 1),
               {.name = "net", .optimizer = Sgd{.lr = 0.5}});
    const std::vector<at::Tensor> start = copies(oracle->parameters());
    GradientAccumulation accumulation(world, {.steps = 2});
    for (int step = 0; step < 20; ++step) {
      const at::Tensor rows =
          keyed({32 * world.size(), 8}, key_of({static_cast<std::int64_t>(step)}));
      const std::vector<at::Tensor> pieces = rows.chunk(2 * world.size());
      for (int i = 0; i < 2; ++i) {
        accumulation.begin();
        loss_of(net.forward(pieces[static_cast<std::size_t>(2 * world.rank() + i)])).backward();
      }
      ASSERT_TRUE(accumulation.boundary());
      world.step();
      sgd.zero_grad();
      loss_of(oracle->forward(rows)).backward();
      sgd.step();
    }
    EXPECT_LE(
        distance(net->parameters(), oracle->parameters(), difference(oracle->parameters(), start)),
        1e-5);
  });
}

TEST(Accumulation, HeldWindowsTravelOnce) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 0.0),
               {.name = "net", .optimizer = Sgd{.lr = 1.0}, .stage = 1});
    const auto launches_of = [&](bool hold) {
      GradientAccumulation accumulation(world, {.steps = 3, .hold = hold});
      const std::int64_t before = world.wire_report().launches;
      for ([[maybe_unused]] const int& element : accumulation.epoch(std::vector<int>(4))) {
        net.forward(torch::ones({1})).sum().backward();
        if (accumulation.boundary()) {
          EXPECT_TRUE(world.step().applied);
        }
      }
      return world.wire_report().launches - before;
    };
    EXPECT_EQ(launches_of(false), 4);
    EXPECT_EQ(launches_of(true), 2);  // a window of 3, the tail of 1
    EXPECT_EQ(net->w.item<float>(), -4.0F);
  });
}

TEST(Accumulation, LoopLeftEarlyHoldsNothingBack) {
  on_ranks(patient(), [](World& world) {
    Engine net(world, std::make_shared<Scale>(1, 0.0),
               {.name = "net", .optimizer = Sgd{.lr = 1.0}, .stage = 1});
    GradientAccumulation accumulation(world, {.steps = 3, .hold = true});
    for ([[maybe_unused]] const int& element : accumulation.epoch(std::vector<int>(6))) {
      break;
    }
    const std::int64_t before = world.wire_report().launches;
    net.forward(torch::ones({1})).sum().backward();
    EXPECT_EQ(world.window(), 1);
    EXPECT_EQ(world.wire_report().launches - before, 1);
    world.step();
  });
}

// Two backward calls in each micro-batch: kMicroBatches divides by the four, so that the update is
// half of what one backward of the sums gives; without an average it is what the losses say.
TEST(Accumulation, SeveralBackwardsInAMicroBatchAreAllDivisors) {
  const auto trained = [](World& world, bool joined, double factor) {
    auto net = number(world, joined ? "joined" : "apart");
    GradientAccumulation accumulation(world, {.steps = 2});
    for ([[maybe_unused]] const int& element : accumulation.epoch(std::vector<int>(2))) {
      const at::Tensor a = factor * gradient_of(net, 3.0);
      const at::Tensor b = factor * gradient_of(net, 5.0);
      if (joined) {
        (a + b).backward();
      } else {
        a.backward();
        b.backward();
      }
    }
    world.step();
    return value_of(net);
  };
  on_ranks(patient(), [&](World& world) {
    EXPECT_EQ(trained(world, true, 1.0), -8.0F);
    EXPECT_EQ(trained(world, false, 1.0), -4.0F);
  });
  WorldOptions options = patient();
  options.average = Average::kNone;
  on_ranks(options, [&](World& world) {
    EXPECT_NEAR(trained(world, false, 0.5 / world.size()), -8.0F, 1e-6);
  });
}

TEST(Accumulation, FailedPassIsRepeatedFromTheWindowsFirst) {
  on_ranks(patient(), [](World& world) {
    auto net = number(world, "net");
    GradientAccumulation accumulation(world, {.steps = 3});
    bool failed = false;
    int passes = 0;
    while (!accumulation.boundary()) {
      accumulation.begin();
      ++passes;
      const at::Tensor input =
          torch::full({1}, static_cast<float>(accumulation.micro_batches())).requires_grad_();
      if (!failed && accumulation.micro_batches() == 2 && world.rank() == world.size() - 1) {
        input.register_hook([](const at::Tensor&) { throw std::runtime_error("on purpose"); });
      }
      try {
        world.backward(net.forward(input).sum());
      } catch (const std::exception&) {
        failed = true;
        EXPECT_EQ(world.window(), 0);
        accumulation.restart();
      }
    }
    EXPECT_EQ(passes, 5);  // one, the failed one, and the three of the repeated window
    EXPECT_EQ(world.step().denominator, 3.0 * world.size());
    EXPECT_EQ(value_of(net), -2.0F);  // (1 + 2 + 3) / 3
  });
}

// The last rank's epoch is one micro-batch shorter: all divide by what was held.
TEST(Accumulation, UnevenTailDividesByWhatAllHeld) {
  on_ranks(
      patient(),
      [](World& world) {
        auto net = number(world, "net");
        const bool fewer = world.rank() + 1 == world.size();
        GradientAccumulation accumulation(world, {.steps = 4});
        for ([[maybe_unused]] const int& element :
             accumulation.epoch(std::vector<int>(fewer ? 6 : 7))) {
          gradient_of(net, 1.0).backward();
          if (accumulation.boundary()) {
            const bool tail = accumulation.micro_batches() < 4;
            EXPECT_EQ(world.step().denominator,
                      tail ? 3.0 * world.size() - 1.0 : 4.0 * world.size());
          }
        }
        EXPECT_EQ(value_of(net), -2.0F);
      },
      2);
}

}  // namespace
}  // namespace tandem::testing
