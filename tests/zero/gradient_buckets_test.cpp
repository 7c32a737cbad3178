// test.zero.gradient_buckets: G1, G2, what is held, what comes late.
#include "zero/gradient_buckets.h"

#include "tests/support/fake_channel.h"
#include <tandem/error.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace tandem::zero {
namespace {

using kernels::Dtype;

constexpr Dtype kF = Dtype::kFloat32;
constexpr Dtype kB = Dtype::kBFloat16;

struct Fixture {
  explicit Fixture(std::vector<std::pair<std::vector<std::int64_t>, Dtype>> parameters,
                   std::int64_t bucket_bytes = 1 << 20) {
    for (auto& [shape, dtype] : parameters) {
      std::int64_t numel = 1;
      for (const std::int64_t size : shape) numel *= size;
      infos.push_back({"p" + std::to_string(infos.size()), shape, numel, dtype});
    }
    plan = plan_buckets(infos, bucket_bytes);
    channel =
        std::make_unique<test_support::FakeChannel>(GradientBuckets::channel_spec(plan, "test"));
    buckets = std::make_unique<GradientBuckets>(plan, *channel, *device);
  }

  /// What a contribution says of a parameter, in fp32.
  at::Tensor read(const Contribution& contribution, std::size_t parameter) const {
    const at::Tensor staged = torch::from_blob(
        contribution.staging.data + static_cast<std::size_t>(plan.offset_of[parameter]) *
                                        kernels::bytes_of(contribution.wire),
        infos[parameter].shape, contribution.wire == kF ? at::kFloat : at::kBFloat16);
    return staged.to(at::kFloat).clone();
  }

  std::vector<ParameterInfo> infos;
  BucketPlan plan;
  std::unique_ptr<test_support::FakeChannel> channel;
  std::unique_ptr<TorchDevice> device = make_torch_cpu();
  std::unique_ptr<GradientBuckets> buckets;
};

at::Tensor bf16(const at::Tensor& tensor) { return tensor.to(at::kBFloat16); }

TEST(GradientBuckets, CopiesGradientsInTheParametersType) {  // G1
  Fixture f({{{3, 2}, kF}, {{1500}, kF}, {{7}, kB}});
  const at::Tensor a = torch::randn({3, 2});
  const at::Tensor b = torch::randn({1500});
  const at::Tensor c = bf16(torch::randn({7}));
  EXPECT_FALSE(f.buckets->has_main(0));
  f.buckets->put_main(0, a, false);
  f.buckets->put_main(1, b, false);
  f.buckets->put_main(2, c, false);
  EXPECT_TRUE(f.buckets->has_main(0));
  EXPECT_FALSE(f.buckets->has_late(0));
  // Two blocks and one of fp32, one of bf16.
  EXPECT_EQ(f.buckets->held_bytes(), 3 * 4096U + 2048U);
  const Contribution fp32 = f.buckets->take_main(0, kF);
  EXPECT_TRUE(torch::equal(f.read(fp32, 0), a));
  EXPECT_TRUE(torch::equal(f.read(fp32, 1), b));
  const Contribution half = f.buckets->take_main(1, kB);
  EXPECT_EQ(half.wire, kB);
  EXPECT_TRUE(torch::equal(f.read(half, 2), c.to(at::kFloat)));
  EXPECT_FALSE(f.buckets->has_main(0));
  EXPECT_EQ(f.buckets->held_bytes(), 0U);
}

TEST(GradientBuckets, FillsWhatDidNotArriveWithZeros) {  // G2
  Fixture f({{{5}, kF}, {{2000}, kF}, {{6}, kF}});
  f.buckets->put_main(2, torch::ones({6}), false);
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_TRUE(torch::equal(f.read(taken, 0), torch::zeros({5})));
  EXPECT_TRUE(torch::equal(f.read(taken, 1), torch::zeros({2000})));
  EXPECT_TRUE(torch::equal(f.read(taken, 2), torch::ones({6})));
}

TEST(GradientBuckets, GivesNoStagingWhenNothingArrived) {
  Fixture f({{{5}, kB}});
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_FALSE(taken.staging);
  EXPECT_EQ(taken.wire, kF);
  EXPECT_FALSE(f.buckets->take_late(0).staging);
  EXPECT_EQ(f.channel->outstanding(), 0U);
}

TEST(GradientBuckets, TakesTheNextPassIntoFreshStaging) {
  Fixture f({{{2}, kF}, {{2}, kF}});
  f.buckets->put_main(0, torch::ones({2}), false);
  f.buckets->put_main(1, torch::ones({2}), false);
  const Contribution first = f.buckets->take_main(0, kF);
  f.buckets->put_main(0, torch::full({2}, 2.0F), false);
  const Contribution second = f.buckets->take_main(0, kF);
  EXPECT_TRUE(torch::equal(f.read(first, 0), torch::ones({2})));
  EXPECT_TRUE(torch::equal(f.read(second, 0), torch::full({2}, 2.0F)));
  EXPECT_TRUE(torch::equal(f.read(second, 1), torch::zeros({2}))) << "not the pass before";
  EXPECT_EQ(f.channel->outstanding(), 2U);
}

// PyTorch 106951, 110758, 47163.
TEST(Cases, N19_StridedExpandedAndNegatedGradientsAreCopiedByValue) {
  for (const Dtype dtype : {kF, kB}) {
    Fixture f({{{4, 6}, dtype}, {{3, 5}, dtype}, {{3}, dtype}, {{8}, dtype}});
    const at::ScalarType type = dtype == kF ? at::kFloat : at::kBFloat16;
    const at::Tensor transposed = torch::randn({6, 4}).to(type).t();
    const at::Tensor expanded = torch::tensor(1.5F).to(type).expand({3, 5});
    const at::Tensor negated = torch::_neg_view(torch::randn({3}).to(type));
    const at::Tensor zeros = at::_efficientzerotensor({8}, at::TensorOptions().dtype(type));
    const std::vector<at::Tensor> gradients = {transposed, expanded, negated, zeros};
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      f.buckets->put_main(static_cast<std::int32_t>(i), gradients[i], false);
      f.buckets->put_late(static_cast<std::int32_t>(i), gradients[i]);
      f.buckets->put_late(static_cast<std::int32_t>(i), gradients[i]);
    }
    const Contribution main = f.buckets->take_main(0, dtype);
    const Contribution late = f.buckets->take_late(0);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor value = gradients[i].to(at::kFloat);
      EXPECT_TRUE(torch::equal(f.read(main, i), value)) << i;
      EXPECT_TRUE(torch::equal(f.read(late, i), 2 * value)) << i;
    }
  }
}

TEST(GradientBuckets, MakesSparseGradientsDense) {
  Fixture f({{{4, 2}, kF}});
  const at::Tensor rows = torch::tensor({{2, 0, 2}}, at::kLong);  // row 2 twice: its values add up
  const at::Tensor sparse = torch::sparse_coo_tensor(rows, torch::ones({3, 2}), {4, 2});
  f.buckets->put_main(0, sparse, false);
  const at::Tensor expected =
      torch::tensor({{1.0F, 1.0F}, {0.0F, 0.0F}, {2.0F, 2.0F}, {0.0F, 0.0F}});
  EXPECT_TRUE(torch::equal(f.read(f.buckets->take_main(0, kF), 0), expected));
}

TEST(GradientBuckets, DetachesGradientsThatHaveAGraph) {
  Fixture f({{{3}, kF}});
  const at::Tensor x = torch::ones({3}).requires_grad_();
  f.buckets->put_main(0, x * 2, false);
  f.buckets->put_late(0, x * 3);
  f.buckets->put_late(0, (x * 3).expand({2, 3})[0]);
  EXPECT_TRUE(torch::equal(f.read(f.buckets->take_main(0, kF), 0), torch::full({3}, 2.0F)));
  EXPECT_TRUE(torch::equal(f.read(f.buckets->take_late(0), 0), torch::full({3}, 6.0F)));
}

TEST(GradientBuckets, HoldsSumsInFp32OverPasses) {  // N12: 301 ones; bf16 would stop at 256
  Fixture f({{{3}, kB}, {{2000}, kB}});
  for (int pass = 0; pass < 301; ++pass) f.buckets->put_main(0, bf16(torch::ones({3})), true);
  f.buckets->put_main(1, bf16(torch::ones({2000})), true);
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_EQ(taken.wire, kF);
  EXPECT_TRUE(torch::equal(f.read(taken, 0), torch::full({3}, 301.0F)));
  EXPECT_TRUE(torch::equal(f.read(taken, 1), torch::ones({2000})));
}

TEST(GradientBuckets, HeldSumsAddInOrderOfArrival) {
  // (1 + 2^-24) - 1 in fp32 is 0; 2^-24 + (1 - 1) is 2^-24. Order of arrival: 1, 2^-24, -1.
  Fixture f({{{1}, kF}});
  for (const float g : {1.0F, 0x1p-24F, -1.0F}) f.buckets->put_main(0, torch::full({1}, g), true);
  EXPECT_EQ(f.read(f.buckets->take_main(0, kF), 0).item<float>(), 0.0F);
}

TEST(GradientBuckets, APassWithoutHoldAddsToWhatIsHeld) {
  Fixture f({{{2}, kB}, {{2}, kB}});
  f.buckets->put_main(0, bf16(torch::full({2}, 256.0F)), true);
  f.buckets->put_main(0, bf16(torch::ones({2})), false);
  f.buckets->put_main(1, bf16(torch::ones({2})), false);
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_TRUE(torch::equal(f.read(taken, 0), torch::full({2}, 257.0F))) << "257 is no bf16";
  EXPECT_TRUE(torch::equal(f.read(taken, 1), torch::ones({2})));
}

TEST(GradientBuckets, AHoldWidensWhatLiesThereIn16Bits) {
  Fixture f({{{2}, kB}, {{2}, kB}, {{2}, kB}});
  f.buckets->put_main(0, bf16(torch::full({2}, 256.0F)), false);
  f.buckets->put_main(1, bf16(torch::full({2}, 3.0F)), false);
  f.buckets->put_main(0, bf16(torch::ones({2})), true);
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_TRUE(torch::equal(f.read(taken, 0), torch::full({2}, 257.0F)));
  EXPECT_TRUE(torch::equal(f.read(taken, 1), torch::full({2}, 3.0F)));
  EXPECT_TRUE(torch::equal(f.read(taken, 2), torch::zeros({2})));
  EXPECT_EQ(f.channel->outstanding(), 1U) << "the 16-bit staging went back";
}

TEST(GradientBuckets, ASecondArrivalWithoutHoldIsAddedInFp32) {
  Fixture f({{{2}, kB}});
  f.buckets->put_main(0, bf16(torch::full({2}, 256.0F)), false);
  f.buckets->put_main(0, bf16(torch::ones({2})), false);
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_TRUE(torch::equal(f.read(taken, 0), torch::full({2}, 257.0F)));
}

TEST(GradientBuckets, WidensWhenAnotherRankHolds) {
  Fixture f({{{2}, kB}});
  f.buckets->put_main(0, bf16(torch::full({2}, 1.5F)), false);
  const Contribution taken = f.buckets->take_main(0, kF);
  EXPECT_EQ(taken.wire, kF);
  EXPECT_TRUE(torch::equal(f.read(taken, 0), torch::full({2}, 1.5F)));
}

TEST(GradientBuckets, LateArrivalsSumApartFromMainInFp32) {
  Fixture f({{{2}, kB}, {{3}, kB}});
  f.buckets->put_main(0, bf16(torch::ones({2})), false);
  f.buckets->put_late(0, bf16(torch::full({2}, 256.0F)));
  f.buckets->put_late(0, bf16(torch::ones({2})));
  EXPECT_TRUE(f.buckets->has_late(0));
  const Contribution main = f.buckets->take_main(0, kB);
  EXPECT_TRUE(f.buckets->has_late(0));
  const Contribution late = f.buckets->take_late(0);
  EXPECT_EQ(late.wire, kF);
  EXPECT_TRUE(torch::equal(f.read(main, 0), torch::ones({2})));
  EXPECT_TRUE(torch::equal(f.read(late, 0), torch::full({2}, 257.0F)));
  EXPECT_TRUE(torch::equal(f.read(late, 1), torch::zeros({3})));
  EXPECT_FALSE(f.buckets->has_late(0));
}

TEST(GradientBuckets, AddsLateToMainOfEnginesThatHold) {
  Fixture f({{{2}, kB}, {{2}, kB}, {{2}, kB}, {{2}, kB}});
  f.buckets->put_main(0, bf16(torch::full({2}, 256.0F)), true);
  f.buckets->put_main(1, bf16(torch::full({2}, 5.0F)), true);
  f.buckets->put_late(0, bf16(torch::ones({2})));
  f.buckets->put_late(2, bf16(torch::full({2}, 7.0F)));
  f.buckets->add_late_to_main(0);
  EXPECT_FALSE(f.buckets->has_late(0));
  EXPECT_EQ(f.channel->outstanding(), 1U);
  f.buckets->put_main(2, bf16(torch::ones({2})), true);  // what was late counts as held
  const Contribution taken = f.buckets->take_main(0, kF);
  const float expected[] = {257.0F, 5.0F, 8.0F, 0.0F};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(torch::equal(f.read(taken, i), torch::full({2}, expected[i]))) << i;
  }
}

TEST(GradientBuckets, LateBecomesMainWhereNothingElseArrived) {
  Fixture f({{{2}, kB}});
  f.buckets->add_late_to_main(0);
  EXPECT_FALSE(f.buckets->has_main(0));
  f.buckets->put_late(0, bf16(torch::ones({2})));
  f.buckets->add_late_to_main(0);
  EXPECT_FALSE(f.buckets->has_late(0));
  EXPECT_TRUE(torch::equal(f.read(f.buckets->take_main(0, kF), 0), torch::ones({2})));
}

TEST(GradientBuckets, DiscardGivesAllStagingBack) {
  Fixture f({{{2}, kF}, {{2}, kB}}, 1);
  f.buckets->put_main(0, torch::ones({2}), true);
  f.buckets->put_main(1, bf16(torch::ones({2})), false);
  f.buckets->put_late(1, bf16(torch::ones({2})));
  EXPECT_EQ(f.channel->outstanding(), 3U);
  f.buckets->discard();
  EXPECT_EQ(f.channel->outstanding(), 0U);
  EXPECT_EQ(f.buckets->held_bytes(), 0U);
  f.buckets->put_main(0, torch::full({2}, 2.0F), true);
  EXPECT_TRUE(torch::equal(f.read(f.buckets->take_main(0, kF), 0), torch::full({2}, 2.0F)))
      << "nothing of the discarded window";
}

TEST(GradientBuckets, EmptyParametersArriveToo) {
  Fixture f({{{0, 3}, kF}});
  f.buckets->put_main(0, torch::empty({0, 3}), false);
  EXPECT_TRUE(f.buckets->has_main(0));
  EXPECT_TRUE(f.buckets->take_main(0, kF).staging);
}

TEST(GradientBuckets, RefusesAGradientOfAnotherSizeAndThenHoldsNothing) {
  Fixture f({{{4}, kF}});
  EXPECT_THAT([&] { f.buckets->put_main(0, torch::ones({5}), false); },
              testing::ThrowsMessage<InvalidArgument>(testing::HasSubstr("5 elements")));
  EXPECT_FALSE(f.buckets->has_main(0));
  EXPECT_EQ(f.channel->outstanding(), 0U);
}

TEST(GradientBuckets, SpecFitsTheLargestBucketInFp32) {
  // Buckets of 2 and 1 blocks of bf16: 2,048 * 4 bytes.
  Fixture f({{{1500}, kB}, {{2}, kB}}, 1);
  const comm::ChannelSpec spec = GradientBuckets::channel_spec(f.plan, "tower");
  EXPECT_EQ(spec.name, "tower");
  EXPECT_EQ(spec.largest_staging, 8192U);
  EXPECT_EQ(spec.parameter_bytes, static_cast<std::size_t>(f.plan.flat_bytes));
  EXPECT_GE(spec.staging_slots, 8U);
  EXPECT_GE(spec.posts_in_flight, 8U);
}

}  // namespace
}  // namespace tandem::zero
