// test.zero.optimizer_shard: O1 to O4 against the plain loop of the functors and an fp64 reference.
#include "zero/optimizer_shard.h"

#include "tests/zero/shard_rig.h"
#include <tandem/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tandem::zero {
namespace {

using kernels::Dtype;

constexpr Dtype kF = Dtype::kFloat32;
constexpr Dtype kB = Dtype::kBFloat16;
constexpr Dtype kH = Dtype::kFloat16;

/// All types; empty, tiny, odd, more than a block, more than a task's length.
std::vector<ParameterInfo> assorted() {
  return infos_of({{5, kF},
                   {70001, kF},
                   {0, kF},
                   {1024, kF},
                   {3, kB},
                   {2500, kB},
                   {1, kF},
                   {600, kB},
                   {777, kF}});
}

std::vector<bool> all_seen(std::size_t count) { return std::vector<bool>(count, true); }

const std::vector<Optimizer>& optimizers() {
  static const std::vector<Optimizer> all = {
      AdamW{.lr = 1e-2, .weight_decay = 0.1},
      AdamW{.lr = 1e-2, .weight_decay = 0.1, .amsgrad = true},
      Adam{.lr = 1e-2, .weight_decay = 0.1},
      Sgd{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .dampening = 0.5},
      Sgd{.lr = 0.1, .momentum = 0.9, .nesterov = true},
      Sgd{.lr = 0.1, .weight_decay = 0.01},
      RmsProp{.weight_decay = 0.01, .momentum = 0.9, .centered = true},
      RmsProp{},
      Adagrad{.lr_decay = 0.1, .initial_accumulator_value = 0.5},
      Lion{.weight_decay = 0.1}};
  return all;
}

/// fp32 arrays an element: what each of optimizers() keeps.
constexpr std::size_t kStates[] = {2, 3, 2, 1, 1, 0, 3, 1, 1, 1};

TEST(OptimizerShard, GivesTheBitsOfThePlainLoopForEveryGroupAndBucketSize) {  // O2, O4
  const auto infos = assorted();
  const Values start = random_values(infos, 1);
  for (const Optimizer& optimizer : optimizers()) {
    PlainLoop plain(infos, optimizer, start);
    std::vector<std::vector<bool>> seen;
    std::vector<Values> gradients;
    for (std::uint64_t s = 0; s < 3; ++s) {
      gradients.push_back(random_values(infos, 100 + s));
      seen.push_back(all_seen(infos.size()));
      seen.back()[(s + 1) % infos.size()] = false;  // the large one, the empty one, the block
      plain.step(gradients.back(), seen.back(), 0.3);
    }
    const Values expected = plain.values();
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const std::int64_t bucket_bytes : {1, 20000, 1 << 30}) {
        ShardRig rig(infos, bucket_bytes, ranks, optimizer, start,
                     ranks % 2 ? serially : in_threads);
        for (std::size_t s = 0; s < gradients.size(); ++s) {
          rig.set_gradients(gradients[s]);
          rig.step(seen[s], 0.3);
        }
        EXPECT_EQ(differing_bits(rig.values(), expected), 0)
            << "optimizer " << optimizer.index() << ", " << ranks << " ranks, " << bucket_bytes
            << " bytes a bucket";
      }
    }
  }
}

TEST(OptimizerShard, KeepsMastersAsRemaindersWithTheSameBits) {
  const auto infos = infos_of({{3, kB}, {70001, kB}, {5, kF}, {1024, kB}});
  const Values start = random_values(infos, 1);
  for (const Optimizer& optimizer : optimizers()) {
    PlainLoop plain(infos, optimizer, start);
    ShardRig rig(infos, 50000, 3, optimizer, start, in_threads, Masters::kRemainder);
    for (std::uint64_t s = 0; s < 4; ++s) {
      const Values gradients = random_values(infos, 100 + s);
      plain.step(gradients, all_seen(infos.size()), 0.3);
      rig.set_gradients(gradients);
      rig.step(all_seen(infos.size()), 0.3);
    }
    EXPECT_EQ(differing_bits(rig.values(), plain.values()), 0) << optimizer.index();
    std::size_t bytes = 0;
    for (std::size_t rank = 0; rank < rig.ranks(); ++rank) bytes += rig.shard(rank).master_bytes();
    EXPECT_EQ(bytes, (69 + 1 + 1) * 1024 * sizeof(std::uint16_t));  // blocks of bf16
  }
}

TEST(OptimizerShard, UpdatesFp16WithTheBitsOfThePlainLoop) {
  const auto infos = infos_of({{3, kH}, {70001, kH}, {5, kF}, {1024, kB}});
  const Values start = random_values(infos, 1);
  for (const Optimizer& optimizer : optimizers()) {
    PlainLoop plain(infos, optimizer, start);
    ShardRig rig(infos, 50000, 3, optimizer, start);
    for (std::uint64_t s = 0; s < 4; ++s) {
      const Values gradients = random_values(infos, 100 + s);
      plain.step(gradients, all_seen(infos.size()), 0.3);
      rig.set_gradients(gradients);
      rig.step(all_seen(infos.size()), 0.3);
    }
    EXPECT_EQ(differing_bits(rig.values(), plain.values()), 0) << optimizer.index();
  }
}

TEST(OptimizerShard, FollowsAdamWInDouble) {
  // Loshchilov and Hutter, algorithm 2, in double. A step makes some ten roundings of 2^-24 of
  // values below 2; 20 steps of them stay well below 1e-6 in the norm of the difference over that
  // of the parameters, and a wrong bias correction, decay or factor lies above 1e-3.
  const AdamW adamw{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  const auto infos = infos_of({{3000, kF}, {7, kF}});
  const Values start = random_values(infos, 1);
  const double factor = 0.25;
  ShardRig rig(infos, 1 << 20, 2, adamw, start);
  std::vector<double> w;
  for (const auto& parameter : start) w.insert(w.end(), parameter.begin(), parameter.end());
  std::vector<double> m(w.size(), 0.0);
  std::vector<double> v(w.size(), 0.0);
  for (int step = 1; step <= 20; ++step) {
    const Values gradients = random_values(infos, 50 + static_cast<std::uint64_t>(step));
    rig.set_gradients(gradients);
    rig.step(all_seen(infos.size()), factor);
    std::size_t at = 0;
    for (const auto& parameter : gradients) {
      for (const float gradient : parameter) {
        const double g = gradient * factor;
        w[at] *= 1.0 - adamw.lr * adamw.weight_decay;
        m[at] = adamw.beta1 * m[at] + (1.0 - adamw.beta1) * g;
        v[at] = adamw.beta2 * v[at] + (1.0 - adamw.beta2) * g * g;
        const double m_hat = m[at] / (1.0 - std::pow(adamw.beta1, step));
        const double v_hat = v[at] / (1.0 - std::pow(adamw.beta2, step));
        w[at] -= adamw.lr * m_hat / (std::sqrt(v_hat) + adamw.eps);
        ++at;
      }
    }
  }
  double difference = 0.0;
  double length = 0.0;
  std::size_t at = 0;
  for (const auto& parameter : rig.values()) {
    for (const float value : parameter) {
      difference += (value - w[at]) * (value - w[at]);
      length += w[at] * w[at];
      ++at;
    }
  }
  EXPECT_LT(std::sqrt(difference / length), 1e-6);
}

TEST(OptimizerShard, SgdWithMomentumByHand) {
  // lr 0.5, momentum 0.5, factor 0.5, gradients 4, 4: g = 2. buffer 2, then 3. 1 - 1 = 0, 0 - 1.5.
  const auto infos = infos_of({{1, kF}});
  ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 0.5, .momentum = 0.5}, {{1.0F}});
  rig.set_gradients({{4.0F}});
  rig.step({true}, 0.5);
  EXPECT_EQ(rig.get(0, 0), 0.0F);
  rig.step({true}, 0.5);
  EXPECT_EQ(rig.get(0, 0), -1.5F);
}

TEST(OptimizerShard, LeavesUnseenParametersAndTheirCountsAlone) {  // O2
  const auto infos = assorted();
  const Values start = random_values(infos, 1);
  ShardRig rig(infos, 20000, 2, AdamW{.lr = 1e-2, .weight_decay = 0.5}, start);
  const Values before = rig.values();
  std::vector<bool> seen = all_seen(infos.size());
  seen[1] = false;
  seen[7] = false;
  rig.set_gradients(random_values(infos, 2));
  rig.step(seen, 1.0);
  const Values after = rig.values();
  for (std::size_t p = 0; p < infos.size(); ++p) {
    for (std::size_t rank = 0; rank < rig.ranks(); ++rank) {
      EXPECT_EQ(rig.shard(rank).step_count(static_cast<std::int32_t>(p)), seen[p] ? 1 : 0);
    }
    if (infos[p].numel == 0) continue;
    EXPECT_EQ(before[p] == after[p], !seen[p]) << "parameter " << p;
  }
}

TEST(OptimizerShard, SumsSquaresOfSeenParametersOnly) {
  const auto infos = infos_of({{1, kF}, {1, kB}, {1, kF}});
  ShardRig rig(infos, 1 << 20, 2, AdamW{}, {{0.0F}, {0.0F}, {0.0F}});
  rig.set_gradients({{3.0F}, {4.0F}, {100.0F}});
  EXPECT_EQ(rig.sum_of_squares({true, true, false}).value(), 25.0);
  EXPECT_EQ(rig.sum_of_squares({false, false, false}).value(), 0.0);
  EXPECT_EQ(rig.norm({true, true, false}, 1.0), 7.0);
  EXPECT_EQ(rig.norm({true, false, false}, 3.0), 3.0);
  EXPECT_EQ(rig.norm({false, false, false}, 3.0), 0.0);
}

TEST(OptimizerShard, NormHasTheSameBitsForEveryGroupAndBucketSize) {
  const auto infos = assorted();
  const Values gradients = random_values(infos, 3);
  double exact = 0.0;  // in double: right to about 80,000 * 2^-53
  for (const auto& parameter : gradients) {
    for (const float g : parameter) exact += static_cast<double>(g) * g;
  }
  double first = 0.0;
  std::vector<double> first_norms;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const std::int64_t bucket_bytes : {1, 9000, 20000, 1 << 30}) {
      ShardRig rig(infos, bucket_bytes, ranks, AdamW{}, random_values(infos, 1), in_threads);
      rig.set_gradients(gradients);
      const double value = rig.sum_of_squares(all_seen(infos.size())).value();
      if (first == 0.0) first = value;
      EXPECT_EQ(value, first) << ranks << " ranks, " << bucket_bytes << " bytes a bucket";
      std::vector<double> norms;
      for (const double p : {0.5, 1.0, 3.0, 100.0}) {
        norms.push_back(rig.norm(all_seen(infos.size()), p));
      }
      if (first_norms.empty()) first_norms = norms;
      EXPECT_EQ(norms, first_norms) << ranks << " ranks, " << bucket_bytes << " bytes a bucket";
    }
  }
  EXPECT_NEAR(first, exact, exact * 1e-11);
}

TEST(OptimizerShard, CountsNonFiniteBlocks) {
  const auto infos = infos_of({{3000, kF}, {2, kB}});
  Values gradients = random_values(infos, 3);
  gradients[0][2999] = std::numeric_limits<float>::infinity();
  gradients[1][0] = std::numeric_limits<float>::quiet_NaN();
  ShardRig rig(infos, 1 << 20, 2, AdamW{}, random_values(infos, 1));
  rig.set_gradients(gradients);
  EXPECT_EQ(rig.sum_of_squares({true, true}).nonfinite(), 2);
  EXPECT_EQ(rig.sum_of_squares({false, true}).nonfinite(), 1);
}

TEST(OptimizerShard, StartsFromAParameterThatWasEdited) {  // O5
  // The master is 1; the user clamps the parameter to 0.5: the next step starts from 0.5. Exact
  // with remainders too: neither 1 nor 0.5 has one.
  for (const Masters masters : {Masters::kSeparate, Masters::kRemainder}) {
    const auto infos = infos_of({{1, kB}});
    ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 0.25}, {{1.0F}}, serially, masters);
    rig.set(0, 0, 0.5F);
    rig.set_gradients({{1.0F}});
    rig.step({true}, 1.0);
    EXPECT_EQ(rig.get(0, 0), 0.25F);
  }
}

TEST(OptimizerShard, TakesNewLearningRateAndDecayBetweenSteps) {
  const auto infos = infos_of({{1, kF}});
  ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 0.25}, {{1.0F}});
  rig.set_gradients({{1.0F}});
  rig.shard(0).groups().set_learning_rate(0, 0.5);
  rig.step({true}, 1.0);
  EXPECT_EQ(rig.get(0, 0), 0.5F);
  // 0.5 - 0.5 * (1 + 2 * 0.5) = -0.5
  rig.shard(0).groups().set_weight_decay(0, 2.0);
  rig.step({true}, 1.0);
  EXPECT_EQ(rig.get(0, 0), -0.5F);
}

TEST(OptimizerShard, UpdatesEachGroupWithItsSettings) {
  // In one bucket: 1 - 0.5 * 1 = 0.5; the second parameter has lr 0.25: 0.75.
  const auto infos = infos_of({{1, kF}, {1, kF}});
  ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 0.5}, {{1.0F}, {1.0F}}, serially, Masters::kSeparate,
               {{.where = name_matches("^p1$"), .lr = 0.25}});
  rig.set_gradients({{1.0F}, {1.0F}});
  rig.step({true, true}, 1.0);
  EXPECT_EQ(rig.get(0, 0), 0.5F);
  EXPECT_EQ(rig.get(1, 0), 0.75F);
}

TEST(OptimizerShard, AnInfiniteGradientStaysWithItsElementWithoutMomentum) {  // O4
  const auto infos = infos_of({{1, kF}, {1, kF}});
  ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 0.5}, {{1.0F}, {1.0F}});
  rig.set_gradients({{std::numeric_limits<float>::infinity()}, {1.0F}});
  rig.step({true, true}, 1.0);
  EXPECT_EQ(rig.get(0, 0), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(rig.get(1, 0), 0.5F);
}

TEST(OptimizerShard, KeepsStatesOfItsOwnSlicesOnly) {  // O1
  // fp32: 70,001 + 1,024 + small ones = 69 + 1 + 2 blocks (5, 1 and 777 with their padding share
  // one block: 16 + 16 + 777 <= 1,024, so 71 in all). bf16: 2,500 is 3 blocks, 3 and 600 share
  // one: 4.
  const auto infos = assorted();
  const std::size_t total = (71 + 4) * 1024 * sizeof(float);
  const std::size_t masters = 4 * 1024 * sizeof(float);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (std::size_t o = 0; o < optimizers().size(); ++o) {
      ShardRig rig(infos, 1 << 30, ranks, optimizers()[o], random_values(infos, 1));
      std::size_t gradient_bytes = 0;
      std::size_t moment_bytes = 0;
      std::size_t master_bytes = 0;
      for (std::size_t rank = 0; rank < rig.ranks(); ++rank) {
        const OptimizerShard& shard = rig.shard(rank);
        // A block more than an even share in each of the two buckets at most.
        EXPECT_LE(shard.gradient_bytes(), total / static_cast<std::size_t>(ranks) + 2 * 4096);
        gradient_bytes += shard.gradient_bytes();
        moment_bytes += shard.moment_bytes();
        master_bytes += shard.master_bytes();
      }
      EXPECT_EQ(gradient_bytes, total);
      EXPECT_EQ(moment_bytes, kStates[o] * total);
      EXPECT_EQ(master_bytes, masters);
    }
  }
}

TEST(OptimizerShard, AccumulatorsStartAtZero) {
  const auto infos = assorted();
  ShardRig rig(infos, 1 << 30, 2, AdamW{}, random_values(infos, 1));
  EXPECT_EQ(rig.sum_of_squares(all_seen(infos.size())).value(), 0.0);
}

// Updates below half a bf16 unit must add up in the master.
TEST(Cases, N12_TinyUpdatesAreNotLost) {
  const auto infos = infos_of({{1, kB}});
  {
    // 1 - 100 * 6e-4 = 0.94; units of bf16 are 2^-8 there: 240.64, rounded 241. Without masters 1.
    ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 6e-4}, {{1.0F}});
    rig.set_gradients({{1.0F}});
    for (int i = 0; i < 100; ++i) rig.step({true}, 1.0);
    EXPECT_EQ(rig.get(0, 0), 241.0F / 256.0F);
  }
  {
    // (1 - 1e-4)^1000 = 0.9048; 231.6 units, rounded 232.
    ShardRig rig(infos, 1 << 20, 1, AdamW{.lr = 1e-2, .weight_decay = 1e-2}, {{1.0F}});
    rig.set_gradients({{0.0F}});
    for (int i = 0; i < 1000; ++i) rig.step({true}, 1.0);
    EXPECT_EQ(rig.get(0, 0), 232.0F / 256.0F);
  }
  {
    // 1 + 512 * 2^-9 = 2, exactly.
    ShardRig rig(infos, 1 << 20, 1, Sgd{.lr = 1.0}, {{1.0F}});
    rig.set_gradients({{-0x1p-9F}});
    for (int i = 0; i < 512; ++i) rig.step({true}, 1.0);
    EXPECT_EQ(rig.get(0, 0), 2.0F);
  }
}

// Megatron 5974: a step in which nothing was seen counted as step 1 and shrank the first real
// update.
TEST(Cases, N13_AStepWithoutGradientIsNoFirstStep) {
  const auto infos = infos_of({{1, kF}});
  const AdamW adamw{.lr = 0.1, .eps = 0.0, .weight_decay = 0.0};
  ShardRig rig(infos, 1 << 20, 1, adamw, {{1.0F}});
  rig.set_gradients({{0.0F}});
  rig.step({false}, 1.0);
  rig.set_gradients({{2.0F}});
  rig.step({true}, 1.0);
  // The first AdamW update is lr * g / |g| = 0.1; the bug's was 0.1 / 1.34384.
  EXPECT_NEAR(rig.get(0, 0), 0.9, 1e-6);
}

// DeepSpeed 8471: a bias frozen every other step has a count of its own.
TEST(Cases, N14_ParametersCountTheirOwnSteps) {
  const auto infos = infos_of({{2000, kF}, {8, kF}});
  const Values start = random_values(infos, 1);
  const AdamW adamw{.lr = 1e-2};
  PlainLoop both(infos, adamw, start);
  ShardRig rig(infos, 1 << 20, 2, adamw, start);
  for (std::uint64_t step = 0; step < 6; ++step) {
    const Values gradients = random_values(infos, 10 + step);
    const std::vector<bool> seen = {true, step % 2 == 0};
    both.step(gradients, seen, 1.0);
    rig.set_gradients(gradients);
    rig.step(seen, 1.0);
  }
  EXPECT_EQ(differing_bits(rig.values(), both.values()), 0);
  EXPECT_EQ(rig.shard(0).step_count(0), 6);
  EXPECT_EQ(rig.shard(1).step_count(1), 3);
}

// DeepSpeed 8158: NaN in the padding of an odd-sized bucket reached the norm. The rig poisons all
// padding; what is no parameter's own must also come through untouched.
TEST(Cases, S3_PoisonedPaddingReachesNeitherNormNorParameters) {
  const auto infos = infos_of({{1025, kF}, {3, kF}, {1027, kB}, {5, kB}});
  ShardRig rig(infos, 1 << 20, 2, AdamW{}, random_values(infos, 1));
  rig.set_gradients(random_values(infos, 2));
  const kernels::Superaccumulator sum = rig.sum_of_squares(all_seen(4));
  EXPECT_EQ(sum.nonfinite(), 0);
  EXPECT_TRUE(std::isfinite(sum.value()));
  rig.step(all_seen(4), 1.0);
  for (const auto& parameter : rig.values()) {
    for (const float value : parameter) EXPECT_TRUE(std::isfinite(value));
  }
  std::vector<bool> own(rig.memory().size(), false);
  for (const BucketLayout& bucket : rig.plan().buckets) {
    const auto element = static_cast<std::int64_t>(kernels::bytes_of(bucket.dtype));
    for (const Placement& placement : bucket.placements) {
      const auto begin = own.begin() + bucket.flat_offset + placement.offset * element;
      std::fill(begin, begin + placement.numel * element, true);
    }
  }
  std::int64_t touched = 0;
  for (std::size_t i = 0; i < own.size(); ++i) {
    touched += !own[i] && rig.memory()[i] != std::byte{0xFF};
  }
  EXPECT_EQ(touched, 0);
}

}  // namespace
}  // namespace tandem::zero
