// tests/support/token_fixture.h: four micro-batches of unequal tokens, whose mean over tokens,
// 97/38, differs from all that wrong averages give.
#pragma once

#include "tests/support/number.h"
#include "tests/support/thread_world.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace tandem::testing {

/// A micro-batch: so many tokens, each with this gradient. The loss is their sum.
struct Piece {
  std::int64_t tokens;
  double gradient;
};
inline constexpr Piece kFixture[] = {{5, 1}, {10, 2}, {20, 3}, {3, 4}};  // two ranks: two each
inline constexpr double kSum = 97.0;     // 5 * 1 + 10 * 2 + 20 * 3 + 3 * 4
inline constexpr double kTokens = 38.0;  // 5 + 10 + 20 + 3
inline constexpr double kMean = kSum / kTokens;

/// What wrong averages give. 2.5: the mean of the micro-batches' means; 2.398551: of the ranks',
/// (25/15 + 72/23) / 2; 1.276316: 97/38 divided by ranks again; 3.130435: one rank's own, 72/23.
inline constexpr double kWrong[] = {2.5, 2.398551, 1.276316, 3.130435, 2.75};

/// The fixture's micro-batches of one rank, in order: 1 x 4, 2 x 2, 4 x 1, or 1, 1 and 2.
inline std::vector<Piece> pieces_of(const World& world) {
  std::vector<Piece> mine;
  for (int i = 0; i < 4; ++i) {
    if (i * world.size() / 4 == world.rank()) {
      mine.push_back(kFixture[i]);
    }
  }
  return mine;
}

inline std::int64_t tokens_of(const World& world) {
  std::int64_t tokens = 0;
  for (const Piece& piece : pieces_of(world)) {
    tokens += piece.tokens;
  }
  return tokens;
}

/// Ranks of a mean pass: (rank, pass) pairs over the passes of the rank that has most of them.
inline double mean_ranks(const World& world) {
  const double passes = world.size() == 1 ? 4.0 : world.size() == 4 ? 1.0 : 2.0;
  return 4.0 / passes;
}

inline WorldOptions averaging(Average average) {
  WorldOptions options = patient();
  options.average = average;
  return options;
}

inline WorldOptions by_tokens() { return averaging(Average::kTokens); }

/// On ranks; alone also on four threads.
inline void on_all_sizes(const WorldOptions& options, const Body& body) {
  on_ranks(options, body);
  if (launched_ranks() == 1 && !on_a_gpu()) {
    on_threads(4, options, body);
  }
}

inline void backward_of_sums(World& world, ScaleEngine& net) {
  for (const Piece& piece : pieces_of(world)) {
    gradient_of(net, static_cast<double>(piece.tokens) * piece.gradient).backward();
  }
}

/// Sum losses of the fixture, each counted.
inline void counted_fixture(World& world, ScaleEngine& net) {
  for (const Piece& piece : pieces_of(world)) {
    gradient_of(net, static_cast<double>(piece.tokens) * piece.gradient).backward();
    world.count_tokens(piece.tokens);
  }
}

inline void expect_mean(double value, double bound) {
  EXPECT_NEAR(value, kMean, bound);
  for (const double wrong : kWrong) {
    EXPECT_GT(std::abs(value - wrong), 0.04);
  }
}

}  // namespace tandem::testing
