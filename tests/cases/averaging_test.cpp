// Cases: losses of language models divided by the wrong number: averaged over micro-batches or
// ranks that hold unequal numbers of tokens, or over tokens that are not in the loss.
//
// The model is a table: row i holds the logits of what follows token i. What is right is one plain
// step of SGD, in fp64, on the mean over all supervised tokens of the window at once.
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace tandem::testing {
namespace {

namespace F = torch::nn::functional;

constexpr std::int64_t kVocabulary = 6;
constexpr std::int64_t kMasked = -100;  // a label that the loss leaves out

at::Tensor start() {
  return torch::arange(kVocabulary * kVocabulary, torch::kFloat)
      .mul(0.7)
      .sin()
      .view({kVocabulary, kVocabulary});
}

/// The table as an engine under SGD with learning rate 1.
struct Model {
  explicit Model(World& world, const char* name = "lm")
      : table(start().requires_grad_()),
        engine(world, {{"table", table}}, {.name = name, .optimizer = Sgd{.lr = 1.0}}) {}
  at::Tensor table;
  Engine<NamedTensors> engine;
};

/// Some sequences in a row: labels are what comes `ahead` places later.
struct Batch {
  at::Tensor inputs;
  at::Tensor labels;

  [[nodiscard]] at::Tensor count() const { return labels.ne(kMasked).sum(); }
};

Batch sequence(std::int64_t tokens, std::int64_t ahead = 1) {
  const at::Tensor place = torch::arange(tokens, torch::kLong);
  const at::Tensor text = (place * place * 5 + place + tokens).remainder(kVocabulary);
  return {text.narrow(0, 0, tokens - ahead), text.narrow(0, ahead, tokens - ahead)};
}

Batch masked(Batch batch, std::int64_t first) {
  batch.labels = batch.labels.clone();
  batch.labels.narrow(0, 0, first).fill_(kMasked);
  return batch;
}

Batch joined(const std::vector<Batch>& batches) {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> labels;
  for (const Batch& batch : batches) {
    inputs.push_back(batch.inputs);
    labels.push_back(batch.labels);
  }
  return {torch::cat(inputs), torch::cat(labels)};
}

at::Tensor loss_of(const at::Tensor& table, const Batch& batch, F::CrossEntropyFuncOptions how) {
  return F::cross_entropy(table.index_select(0, batch.inputs), batch.labels,
                          how.ignore_index(kMasked));
}
at::Tensor sum_of(const at::Tensor& table, const Batch& batch) {
  return loss_of(table, batch, F::CrossEntropyFuncOptions().reduction(torch::kSum));
}
at::Tensor mean_of(const at::Tensor& table, const Batch& batch) {
  return loss_of(table, batch, F::CrossEntropyFuncOptions().reduction(torch::kMean));
}

using Loss = std::function<at::Tensor(const at::Tensor& table)>;

/// `from` after one step on `loss`, by LibTorch alone.
at::Tensor stepped(const at::Tensor& from, const Loss& loss) {
  const at::Tensor table = from.detach().to(torch::kDouble).requires_grad_();
  loss(table).backward();
  return (table - table.grad()).detach();
}

double distance(const at::Tensor& table, const at::Tensor& expected) {
  return (table.detach().to(torch::kDouble) - expected).abs().max().item<double>();
}

/// Logits of at most 1 and gradients below 1 in fp32: a handful of roundings of 2^-24 each.
constexpr double kClose = 1e-6;

/// The micro-batches of one rank, in order.
std::vector<Batch> dealt_to(const World& world, const std::vector<Batch>& all) {
  std::vector<Batch> mine;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i * static_cast<std::size_t>(world.size()) / all.size() ==
        static_cast<std::size_t>(world.rank())) {
      mine.push_back(all[i]);
    }
  }
  return mine;
}

void counted_pass(World& world, const Model& lm, const Batch& batch) {
  sum_of(lm.table, batch).backward();
  world.count_tokens(batch.count());
}

WorldOptions averaging(Average average) {
  WorldOptions options = patient();
  options.average = average;
  return options;
}

std::vector<Batch> unequal() { return {sequence(2), sequence(8), sequence(3), sequence(15)}; }

// The loss of a rank's micro-batch was its own mean, and those means were averaged: tokens of short
// micro-batches, and of ranks with few tokens, weighed more.
TEST(Cases, T1_MeanOverTokensIsNoMeanOfMeans) {
  const std::vector<Batch> all = unequal();
  const at::Tensor expected =
      stepped(start(), [&](const at::Tensor& table) { return mean_of(table, joined(all)); });
  const at::Tensor wrong = stepped(start(), [&](const at::Tensor& table) {
    return (mean_of(table, all[0]) + mean_of(table, all[1]) + mean_of(table, all[2]) +
            mean_of(table, all[3])) /
           4;
  });
  for (const bool weighted : {false, true}) {
    on_ranks(averaging(Average::kTokens), [&](World& world) {
      const Model lm(world);
      for (const Batch& batch : dealt_to(world, all)) {
        if (weighted) {
          world.backward(mean_of(lm.table, batch), {.weight = batch.count()});
        } else {
          counted_pass(world, lm, batch);
        }
      }
      EXPECT_EQ(world.step().denominator, 1.0 + 7.0 + 2.0 + 14.0);
      EXPECT_LT(distance(lm.table, expected), kClose);
      EXPECT_GT(distance(lm.table, wrong), 0.02);
    });
  }
}

// Two samples of 11 and 101 tokens, that is 10 and 100 labels, in two micro-batches: the sums of
// both over 110, as in one batch of two; not half of each mean.
TEST(Cases, T2_TwoMicroBatchesAreAsOneBatchOfTwo) {
  const std::vector<Batch> samples = {sequence(11), sequence(101)};
  const at::Tensor expected = stepped(start(), [&](const at::Tensor& table) {
    return (sum_of(table, samples[0]) + sum_of(table, samples[1])) / 110;
  });
  for (const bool one_batch : {false, true}) {
    on_ranks(averaging(Average::kTokens), [&](World& world) {
      const Model lm(world);
      const std::vector<Batch> batches = one_batch ? std::vector<Batch>{joined(samples)} : samples;
      for (const Batch& batch : dealt_to(world, batches)) {
        counted_pass(world, lm, batch);
      }
      EXPECT_EQ(world.step().denominator, 110.0);
      EXPECT_LT(distance(lm.table, expected), kClose);
    });
  }
}

// Thirty-two micro-batches of one sequence trained otherwise than one batch of thirty-two, padded
// to the longest: the losses parted from the first update on.
TEST(Cases, T3_ThirtyTwoMicroBatchesAreAsABatchOfThirtyTwo) {
  std::vector<Batch> singles;
  std::vector<Batch> padded;
  constexpr std::int64_t kLongest = 40;
  for (std::int64_t i = 0; i < 32; ++i) {
    singles.push_back(sequence(2 + i * 7 % 37));
    const std::int64_t missing = kLongest - singles.back().labels.numel();
    padded.push_back({torch::constant_pad_nd(singles.back().inputs, {0, missing}, 0),
                      torch::constant_pad_nd(singles.back().labels, {0, missing}, kMasked)});
  }
  on_ranks(averaging(Average::kTokens), [&](World& world) {
    const Model many(world, "many");
    const Model one(world, "one");
    for (int update = 0; update < 5; ++update) {
      for (const Batch& batch : dealt_to(world, singles)) {
        sum_of(many.table, batch).backward();
        world.count_tokens(batch.count());
      }
      const StepResult apart = world.step();
      counted_pass(world, one, joined(dealt_to(world, padded)));
      const StepResult together = world.step();
      EXPECT_EQ(apart.denominator, together.denominator);
      EXPECT_NEAR(apart.norm, together.norm, kClose);
      EXPECT_LT(distance(many.table, one.table.detach().to(torch::kDouble)), kClose);
    }
    EXPECT_GT(distance(many.table, start()), 0.1);
  });
}

// A wrong divisor that this kind of loss invites: labels that are in no sum, those before the shift
// by one (one too many for each sequence) and masked prompts. Counted is what the loss adds up.
TEST(Cases, T4_OnlySupervisedTokensAreCounted) {
  const std::vector<Batch> all = {masked(sequence(9), 5), masked(sequence(4), 1), sequence(12),
                                  masked(sequence(30), 25)};
  const at::Tensor expected =
      stepped(start(), [&](const at::Tensor& table) { return mean_of(table, joined(all)); });
  on_ranks(averaging(Average::kTokens), [&](World& world) {
    const Model lm(world);
    for (const Batch& batch : dealt_to(world, all)) {
      counted_pass(world, lm, batch);
    }
    EXPECT_EQ(world.step().denominator, 3.0 + 2.0 + 11.0 + 4.0);  // of 9 + 4 + 12 + 30
    EXPECT_LT(distance(lm.table, expected), kClose);
  });
}

// Two more: a factor of the number of ranks, where counts are joint and losses are averaged again,
// and a short last window divided as a full one. The same micro-batches on any number of ranks, in
// a window of four and a last one of two.
TEST(Cases, T5_NoFactorOfRanksNorOfAFullWindow) {
  const std::vector<Batch> tail = {sequence(5), sequence(21)};
  at::Tensor expected = start();
  for (const auto& window : {unequal(), tail}) {
    expected =
        stepped(expected, [&](const at::Tensor& table) { return mean_of(table, joined(window)); });
  }
  on_ranks(averaging(Average::kTokens), [&](World& world) {
    const Model lm(world);
    for (const auto& window : {unequal(), tail}) {
      for (const Batch& batch : dealt_to(world, window)) {
        counted_pass(world, lm, batch);
      }
      EXPECT_TRUE(world.step().applied);
    }
    EXPECT_LT(distance(lm.table, expected), kClose);
  });
}

// An auxiliary term was divided by the tokens of the main one. Both reach the same table: their
// counts are summed up front, over the micro-batches and ranks of the window.
TEST(Cases, T6_EachTermHasItsOwnDenominator) {
  const std::vector<Batch> mains = unequal();
  const std::vector<Batch> others = {masked(sequence(40), 3), sequence(3), sequence(2),
                                     masked(sequence(6), 4)};
  const at::Tensor expected = stepped(start(), [&](const at::Tensor& table) {
    return mean_of(table, joined(mains)) + 0.5 * mean_of(table, joined(others));
  });
  on_ranks(averaging(Average::kNone), [&](World& world) {
    const Model lm(world);
    const auto mine = dealt_to(world, mains);
    const auto mine_too = dealt_to(world, others);
    const auto tokens = [&](const std::vector<Batch>& batches) {
      double count = 0;
      for (const Batch& batch : batches) {
        count += batch.count().item<double>();
      }
      return world.sum(count);
    };
    const double main_tokens = tokens(mine);
    const double other_tokens = tokens(mine_too);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      (sum_of(lm.table, mine[i]) / main_tokens + 0.5 * sum_of(lm.table, mine_too[i]) / other_tokens)
          .backward();
    }
    EXPECT_TRUE(world.step().applied);
    EXPECT_LT(distance(lm.table, expected), kClose);
  });
}

// A micro-batch without a supervised token has a loss of 0/0, which made every parameter NaN.
TEST(Cases, T18_AllMaskedStaysFinite) {
  const Batch nothing = masked(sequence(7), 6);
  const std::vector<Batch> some = {nothing, sequence(8), sequence(3), nothing};
  const auto unguarded = [](const at::Tensor& table, const Batch& batch) {
    const at::Tensor losses =
        F::cross_entropy(table.index_select(0, batch.inputs), batch.labels.clamp_min(0),
                         F::CrossEntropyFuncOptions().reduction(torch::kNone));
    return (losses * batch.labels.ne(kMasked)).sum() / batch.count();
  };
  ASSERT_TRUE(stepped(start(), [&](const at::Tensor& table) { return unguarded(table, nothing); })
                  .isnan()
                  .any()
                  .item<bool>());
  const at::Tensor expected =
      stepped(start(), [&](const at::Tensor& table) { return mean_of(table, joined(some)); });
  for (const bool weighted : {false, true}) {
    on_ranks(averaging(Average::kTokens), [&](World& world) {
      const Model lm(world);
      const auto window = [&](const std::vector<Batch>& batches) {
        for (const Batch& batch : dealt_to(world, batches)) {
          if (weighted) {
            world.backward(unguarded(lm.table, batch), {.weight = batch.count()});
          } else {
            counted_pass(world, lm, batch);
          }
        }
        return world.step();
      };
      EXPECT_EQ(window({nothing, nothing, nothing, nothing}).reason, StepReason::kEmpty);
      EXPECT_TRUE(lm.table.equal(start()));
      EXPECT_EQ(window(some).denominator, 7.0 + 2.0);
      EXPECT_LT(distance(lm.table, expected), kClose);
    });
  }
}

// The loss of a second head, which looks two tokens ahead and has a mask of its own, was divided by
// the first head's tokens. Two engines of one step have their own counts.
TEST(Cases, T19_HeadsAreDividedByTheirOwnMasks) {
  const std::vector<Batch> next = unequal();
  const std::vector<Batch> after_next = {masked(sequence(9, 2), 5), sequence(8, 2), sequence(3, 2),
                                         sequence(15, 2)};
  const auto expected = [](const std::vector<Batch>& all) {
    return stepped(start(), [&](const at::Tensor& table) { return mean_of(table, joined(all)); });
  };
  on_ranks(averaging(Average::kTokens), [&](World& world) {
    Model lm(world, "lm");
    Model head(world, "head");
    const auto mine = dealt_to(world, next);
    const auto mine_too = dealt_to(world, after_next);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      (sum_of(lm.table, mine[i]) + sum_of(head.table, mine_too[i])).backward();
      lm.engine.count_tokens(mine[i].count());
      head.engine.count_tokens(mine_too[i].count());
    }
    const StepResult result = world.step();
    EXPECT_EQ(result.engines[0].denominator, 24.0);
    EXPECT_EQ(result.engines[1].denominator, 2.0 + 6.0 + 1.0 + 13.0);
    EXPECT_LT(distance(lm.table, expected(next)), kClose);
    EXPECT_LT(distance(head.table, expected(after_next)), kClose);
  });
}

// Losses that are sums were averaged over ranks all the same, so that the gradient fell with their
// number. Without an average the sum is applied, by tokens its mean, relatively to 2e-5.
TEST(Cases, T20_SumLossesAreNotAveragedOverRanks) {
  const std::vector<Batch> all = unequal();
  for (const auto& [average, divisor] :
       {std::pair{Average::kNone, 1.0}, {Average::kTokens, 24.0}}) {
    const at::Tensor expected =
        start().to(torch::kDouble) - stepped(start(), [&](const at::Tensor& table) {
          return sum_of(table, joined(all)) / divisor;
        });
    on_ranks(averaging(average), [&](World& world) {
      Model lm(world);
      for (const Batch& batch : dealt_to(world, all)) {
        counted_pass(world, lm, batch);
      }
      const at::Tensor gradient = lm.engine.gradient("table").to(torch::kDouble);
      EXPECT_TRUE(torch::allclose(gradient, expected, 2e-5, 1e-7));
      EXPECT_EQ(world.step().denominator, divisor);
      EXPECT_LT(distance(start() - lm.table, expected), kClose * 24.0 / divisor);
    });
  }
}

}  // namespace
}  // namespace tandem::testing
