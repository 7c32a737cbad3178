// tests/integration/random_windows_test.cpp: random programs of passes, holds, counts, multipliers,
// gradient() and steps of some engines, on ranks that reach other engines and run out of data,
// against a few lines of arithmetic in double. A failing seed stands in the message.
#include "tests/support/number.h"
#include "tests/support/thread_world.h"

#include <torch/types.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace tandem::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// What one engine should have gathered, and be.
struct Expected {
  double value = 0.0;
  double sum = 0.0;
  double passes = 0.0;
  double pairs = 0.0;
  double tokens = 0.0;

  [[nodiscard]] double gradient(Average average) const {
    switch (average) {
      case Average::kRanks:
        return sum / (pairs / passes);
      case Average::kMicroBatches:
        return sum / pairs;
      case Average::kTokens:
        return sum / tokens;
      case Average::kNone:
        break;
    }
    return sum;
  }
  [[nodiscard]] bool seen() const { return passes > 0.0; }
  void empty() { *this = {.value = value}; }
};

/// One rank's run of the program that `seed` says. Every rank draws the same numbers, the others'
/// included, so that it knows what all of them do.
class Program {
 public:
  Program(World& world, std::uint64_t seed, bool scaled)
      : world_(world), random_(seed), scaled_(scaled) {
    const int count = pick(1, 3);
    expected_.resize(static_cast<std::size_t>(count));
    for (int e = 0; e < count; ++e) {
      engines_.push_back(
          std::make_unique<ScaleEngine>(world, std::make_shared<Scale>(1, 0.0),
                                        EngineOptions{.name = "engine" + std::to_string(e),
                                                      .optimizer = Sgd{.lr = 1.0},
                                                      .stage = pick(1, 2)}));
    }
  }

  void run(int windows) {
    for (int w = 0; w < windows; ++w) {
      window();
    }
  }

 private:
  int pick(int low, int high) { return low + static_cast<int>(random_() % (high - low + 1)); }
  bool chance(int percent) { return pick(1, 100) <= percent; }

  void window() {
    const int passes = pick(1, 3);
    // A rank that runs out of data makes no further pass, but all other calls.
    std::vector<int> of_rank;
    bool even = true;
    for (int rank = 0; rank < world_.size(); ++rank) {
      of_rank.push_back(chance(20) ? pick(0, passes) : passes);
      even = even && of_rank.back() == passes;
    }
    of_rank[static_cast<std::size_t>(pick(0, world_.size() - 1))] = passes;
    for (int pass = 0; pass < passes; ++pass) {
      if (chance(30)) {
        multiply();
      }
      backward(pass, of_rank);
      if (chance(40)) {
        multiply();
      }
      if (even && chance(20)) {
        look();
      }
    }
    step();
  }

  void backward(int pass, const std::vector<int>& of_rank) {
    at::Tensor loss;
    double ran = 0.0;
    std::vector<bool> reached(engines_.size());
    const bool poisoned = chance(10);
    bool hold = false;
    for (int rank = 0; rank < world_.size(); ++rank) {
      const bool runs = pass < of_rank[static_cast<std::size_t>(rank)];
      const bool mine = rank == world_.rank();
      const bool holds = chance(30);
      ran += runs ? 1.0 : 0.0;
      hold = mine ? holds : hold;
      const int always = pick(0, static_cast<int>(engines_.size()) - 1);
      for (std::size_t e = 0; e < engines_.size(); ++e) {
        const bool reaches = chance(60) || static_cast<int>(e) == always;
        const float gradient = poisoned && chance(20) ? kInfinity : static_cast<float>(pick(-4, 4));
        const int tokens = pick(1, 9);
        if (!runs) {
          continue;
        }
        expected_[e].tokens += tokens;
        if (mine) {
          engines_[e]->count_tokens(tokens);
        }
        if (!reaches) {
          continue;
        }
        expected_[e].sum += gradient;
        reached[e] = true;
        if (mine) {
          const at::Tensor term = gradient_of(*engines_[e], gradient);
          loss = loss.defined() ? loss + term : term;
        }
      }
    }
    for (std::size_t e = 0; e < engines_.size(); ++e) {
      if (reached[e]) {
        expected_[e].passes += 1.0;
        expected_[e].pairs += ran;
      }
    }
    if (loss.defined()) {
      const std::optional<Scope> scope =
          hold ? std::optional<Scope>(world_.hold()) : std::optional<Scope>();
      (scaled_ ? world_.scale(loss) : loss).backward();
    }
  }

  void multiply() {
    constexpr double kFactors[] = {0.5, 2.0, 0.0, -1.0, 1.5};
    const double factor = kFactors[pick(0, 4)];
    const int only = pick(-1, static_cast<int>(engines_.size()) - 1);
    if (only < 0) {
      world_.multiply_gradients(factor);
    } else {
      engines_[static_cast<std::size_t>(only)]->multiply_gradients(factor);
    }
    for (std::size_t e = 0; e < engines_.size(); ++e) {
      if (only < 0 || static_cast<int>(e) == only) {
        expected_[e].sum *= factor;
      }
    }
  }

  void look() {
    const auto e = static_cast<std::size_t>(pick(0, static_cast<int>(engines_.size()) - 1));
    const at::Tensor gradient = engines_[e]->gradient("w");
    ASSERT_EQ(gradient.defined(), expected_[e].seen());
    if (gradient.defined()) {
      expect_near(gradient.item<double>(), expected_[e].gradient(world_.average()), "gradient");
    }
  }

  void step() {
    StepOptions options;
    std::vector<std::size_t> stepped;
    const bool all = chance(60);
    for (std::size_t e = 0; e < engines_.size(); ++e) {
      if (all || chance(50) || (e + 1 == engines_.size() && stepped.empty())) {
        stepped.push_back(e);
        options.engines.push_back(engines_[e].get());
      }
    }
    const StepResult result = world_.step(options);
    bool any = false;
    bool finite = true;
    for (const std::size_t e : stepped) {
      any = any || expected_[e].seen();
      finite = finite && (!expected_[e].seen() || std::isfinite(expected_[e].sum));
    }
    EXPECT_EQ(result.applied, any && finite);
    EXPECT_EQ(result.reason, !any     ? StepReason::kEmpty
                             : finite ? StepReason::kApplied
                                      : StepReason::kNonFinite);
    double squares = 0.0;
    for (const std::size_t e : stepped) {
      if (expected_[e].seen()) {
        const double gradient = expected_[e].gradient(world_.average());
        squares += gradient * gradient;
        expected_[e].value -= any && finite ? gradient : 0.0;
      }
      expected_[e].empty();
    }
    if (any && finite) {
      expect_near(result.norm, std::sqrt(squares), "norm");
    }
    for (std::size_t e = 0; e < engines_.size(); ++e) {
      expect_near(value_of(*engines_[e]), expected_[e].value, "value");
      expected_[e].value = value_of(*engines_[e]);  // else roundings of all windows add up
    }
  }

  static void expect_near(double got, double wanted, const char* what) {
    if (std::isfinite(wanted)) {
      EXPECT_NEAR(got, wanted, 1e-5 * std::max(10.0, std::abs(wanted))) << what;
    } else {
      EXPECT_FALSE(std::isfinite(got)) << what << " " << got << ", not " << wanted;
    }
  }

  World& world_;
  std::mt19937_64 random_;
  bool scaled_;
  std::vector<std::unique_ptr<ScaleEngine>> engines_;
  std::vector<Expected> expected_;
};

TEST(RandomWindows, AreWhatArithmeticSays) {
  for (const Average average :
       {Average::kRanks, Average::kMicroBatches, Average::kTokens, Average::kNone}) {
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      const bool scaled = seed % 2 == 1;
      SCOPED_TRACE("average " + std::to_string(static_cast<int>(average)) + ", seed " +
                   std::to_string(seed));
      WorldOptions options = patient();
      options.average = average;
      options.loss_scaling.growth_interval = 3;
      on_ranks(options, [&](World& world) { Program(world, seed, scaled).run(6); });
    }
  }
}

}  // namespace
}  // namespace tandem::testing
