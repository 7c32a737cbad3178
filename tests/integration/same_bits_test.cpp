// tests/integration/same_bits_test.cpp: the same parameters, bit for bit, on any number of ranks,
// whatever the timing and the cut into buckets. Twelve micro-batches a step are dealt to 1, 2, 3
// and 4 ranks; under a launcher its ranks are compared with one thread that does all, alone thread
// worlds of every size are.
#include "kernels/isa.h"
#include "tests/support/scenarios.h"
#include "tests/support/trainer.h"

#include <gtest/gtest.h>

#include <utility>

namespace tandem::testing {
namespace {

TEST(SameBits, OnAnyNumberOfRanks) {
  expect_same_bits(dealt(three_engines_in_one_loss()));
  expect_same_bits(dealt(chained()));
}

TEST(SameBits, WithManyBlocks) {
  Scenario scenario = two_engines_in_one_loss();
  scenario.nets = [] {
    return Nets{net_of(std::make_shared<Mlp>(8, 257, 8, 1)),
                net_of(std::make_shared<Mlp>(8, 384, 8, 2))};
  };
  expect_same_bits(dealt(scenario));
}

TEST(SameBits, WithClipping) {
  Scenario scenario = dealt(two_engines_in_one_loss());
  scenario.clip_norm = 0.05;
  expect_same_bits(scenario);
}

TEST(SameBits, InBf16AndMixed) {
  expect_same_bits(dealt(in_bf16(two_engines_in_one_loss(), {0, 1})));
  expect_same_bits(dealt(in_bf16(two_engines_in_one_loss(), {1})));
}

TEST(SameBits, AveragedByTokens) {
  Scenario scenario = dealt(two_engines_in_one_loss());
  scenario.average = Average::kTokens;
  scenario.tokens = [](const Place& place) { return 1 + place.micro_batch() * 7; };
  expect_same_bits(scenario);
}

TEST(SameBits, WithSgdMomentum) { expect_same_bits(dealt(with_sgd(chained(), 0.1, 0.9))); }

TEST(SameBits, WhateverTheBucketSize) {
  const Scenario scenario = dealt(three_engines_in_one_loss());
  const std::uint64_t expected = trained_hash_on_threads(1, scenario, patient());
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{5000}, std::int64_t{1} << 30}) {
    on_ranks(options_for(scenario), [&](World& world) {
      EXPECT_EQ(trained_hash(world, with_bucket_bytes(scenario, bytes)), expected) << bytes;
    });
  }
}

TEST(SameBits, WhateverTheTimingOfTheQueues) {
  const Scenario scenario = dealt(with_bucket_bytes(chained(), 1));
  const std::uint64_t expected = trained_hash_on_threads(1, scenario, patient());
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    WorldOptions options = options_for(scenario);
    options.queue_delay_us = 300;
    options.queue_delay_seed = seed;
    on_ranks(options,
             [&](World& world) { EXPECT_EQ(trained_hash(world, scenario), expected) << seed; });
  }
}

TEST(SameBits, OnEveryInstructionSet) {
  const Scenario scenario = dealt(in_bf16(two_engines_in_one_loss(), {1}));
  const std::uint64_t expected = trained_hash_on_threads(1, scenario, patient());
  const kernels::Isa best = kernels::current_isa();
  for (const kernels::Isa isa : kernels::available_isas()) {
    kernels::select_isa(isa);
    on_ranks(options_for(scenario), [&](World& world) {
      EXPECT_EQ(trained_hash(world, scenario), expected) << kernels::name_of(isa);
    });
  }
  kernels::select_isa(best);
}

TEST(SameBits, InEveryRun) {
  Scenario scenario = dealt(siamese());
  on_ranks(options_for(scenario), [&](World& world) {
    EXPECT_EQ(trained_hash(world, scenario), trained_hash(world, scenario));
  });
}

// What the hash is worth: one step fewer, or the same engines in another order, give other hashes.
TEST(SameBits, HashesTellDifferentParametersApart) {
  const Scenario scenario = dealt(two_engines_in_one_loss());
  Scenario shorter = scenario;
  shorter.steps = 3;
  Scenario swapped = scenario;
  swapped.nets = [make = scenario.nets] {
    const Nets nets = make();
    return Nets{nets[1], nets[0]};
  };
  swapped.losses = [plain = scenario.losses](const Nets& nets, const Place& place) {
    return plain({nets[1], nets[0]}, place);
  };
  swapped.engines = {scenario.engines[1], scenario.engines[0]};
  const std::uint64_t hash = trained_hash_on_threads(1, scenario, patient());
  EXPECT_NE(trained_hash_on_threads(1, shorter, patient()), hash);
  EXPECT_NE(trained_hash_on_threads(1, swapped, patient()), hash);
}

}  // namespace
}  // namespace tandem::testing
