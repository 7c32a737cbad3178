// test.zero.bucket_plan: B1 to B4 over random lists of parameters, and the edges.
#include "zero/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace tandem::zero {
namespace {

using kernels::Dtype;

std::int64_t element_bytes(Dtype dtype) {
  return static_cast<std::int64_t>(kernels::bytes_of(dtype));
}

std::vector<ParameterInfo> parameters_of(const std::vector<std::int64_t>& numels,
                                         Dtype dtype = Dtype::kFloat32) {
  std::vector<ParameterInfo> parameters;
  for (std::size_t i = 0; i < numels.size(); ++i) {
    parameters.push_back({"p" + std::to_string(i), {numels[i]}, numels[i], dtype});
  }
  return parameters;
}

double thread_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// B1 to B4 and what follows from them for the flat memory.
void expect_sound(const BucketPlan& plan,
                  const std::vector<ParameterInfo>& parameters,
                  std::int64_t bucket_bytes) {
  ASSERT_EQ(plan.bucket_of.size(), parameters.size());
  ASSERT_EQ(plan.offset_of.size(), parameters.size());
  std::vector<int> placed(parameters.size(), 0);
  std::int64_t flat = 0;
  std::int32_t first_before = -1;
  std::map<Dtype, std::int32_t> last_of_dtype;
  for (std::size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketLayout& bucket = plan.buckets[b];
    SCOPED_TRACE("bucket " + std::to_string(b));
    ASSERT_FALSE(bucket.placements.empty());
    EXPECT_GT(bucket.numel, 0);
    EXPECT_EQ(bucket.numel % kBlock, 0) << "B3";
    if (bucket.numel * element_bytes(bucket.dtype) > bucket_bytes) {
      EXPECT_EQ(bucket.placements.size(), 1U) << "B3";
    }
    EXPECT_EQ(bucket.flat_offset % 4096, 0);
    EXPECT_EQ(bucket.flat_offset, flat) << "buckets lie one after another";
    flat += (bucket.numel * element_bytes(bucket.dtype) + 4095) / 4096 * 4096;

    std::int64_t end = 0;
    std::int32_t first = bucket.placements.front().parameter;
    std::int32_t last = first;
    for (const Placement& placement : bucket.placements) {
      const auto i = static_cast<std::size_t>(placement.parameter);
      ++placed[i];
      EXPECT_EQ(plan.bucket_of[i], static_cast<std::int32_t>(b));
      EXPECT_EQ(plan.offset_of[i], placement.offset);
      EXPECT_EQ(placement.numel, parameters[i].numel) << "B1";
      EXPECT_EQ(parameters[i].dtype, bucket.dtype) << "B1";
      EXPECT_GE(placement.offset, end) << "B2";
      if (placement.numel >= kBlock) {
        EXPECT_EQ(placement.offset % kBlock, 0) << "B2";
      } else {
        EXPECT_EQ(placement.offset * element_bytes(bucket.dtype) % 64, 0) << "B2";
        if (placement.numel > 0) {
          EXPECT_EQ(placement.offset / kBlock, (placement.offset + placement.numel - 1) / kBlock)
              << "B2";
        }
      }
      end = placement.offset + placement.numel;
      first = std::min(first, placement.parameter);
      last = std::max(last, placement.parameter);
    }
    EXPECT_LE(end, bucket.numel) << "B3";
    EXPECT_GT(first, first_before) << "B4 numbered by the first parameter";
    first_before = first;
    const auto before = last_of_dtype.find(bucket.dtype);
    if (before != last_of_dtype.end()) {
      EXPECT_GT(first, before->second) << "B4 registration order";
    }
    last_of_dtype[bucket.dtype] = last;
  }
  EXPECT_EQ(plan.flat_bytes, flat);
  EXPECT_EQ(std::count(placed.begin(), placed.end(), 1),
            static_cast<std::ptrdiff_t>(parameters.size()))
      << "B1 exactly once";
}

TEST(BucketPlan, IsSoundForRandomParameters) {  // B1, B2, B3, B4
  std::mt19937_64 random(7);
  for (int round = 0; round < 400; ++round) {
    std::vector<ParameterInfo> parameters;
    const auto count = static_cast<std::size_t>(random() % 60);
    for (std::size_t i = 0; i < count; ++i) {
      // Sizes around 0, one cache line, a block, and some blocks.
      const std::int64_t magnitudes[] = {1, 20, 1100, 5000};
      const std::int64_t numel = static_cast<std::int64_t>(random()) & 0x7FFFFFFF;
      const Dtype dtype = random() % 3 == 0 ? Dtype::kBFloat16 : Dtype::kFloat32;
      parameters.push_back(
          {"p" + std::to_string(i), {}, numel % (magnitudes[random() % 4] + 1), dtype});
    }
    const std::int64_t bucket_bytes = 1 + static_cast<std::int64_t>(random() % 60000);
    SCOPED_TRACE("round " + std::to_string(round));
    expect_sound(plan_buckets(parameters, bucket_bytes), parameters, bucket_bytes);
    if (HasFailure()) return;
  }
}

TEST(BucketPlan, EmptyListGivesAnEmptyPlan) {
  const BucketPlan plan = plan_buckets({}, 1 << 20);
  EXPECT_TRUE(plan.buckets.empty());
  EXPECT_EQ(plan.flat_bytes, 0);
}

TEST(BucketPlan, CutsWhereTheNextParameterWouldNotFit) {
  // fp32, 3 blocks a bucket: 1024 + 2048 fill one, 1025 takes two blocks of the next, 100 the
  // third.
  const auto parameters = parameters_of({1024, 2048, 1025, 100, 1});
  const BucketPlan plan = plan_buckets(parameters, 3 * 4096);
  expect_sound(plan, parameters, 3 * 4096);
  EXPECT_EQ(plan.bucket_of, (std::vector<std::int32_t>{0, 0, 1, 1, 1}));
  // 100 elements end at 2148; 64 bytes are 16 elements: the scalar starts at 2048 + 112.
  EXPECT_EQ(plan.offset_of, (std::vector<std::int64_t>{0, 1024, 0, 2048, 2160}));
}

TEST(BucketPlan, LargeParametersComeFirstInABucket) {
  const BucketPlan plan = plan_buckets(parameters_of({5, 1500, 7, 1024}), 1 << 20);
  EXPECT_EQ(plan.offset_of, (std::vector<std::int64_t>{3072, 0, 3088, 2048}));
  EXPECT_EQ(plan.buckets[0].numel, 4096);
}

TEST(BucketPlan, SmallParametersDoNotStraddleABlock) {
  // 600 + 600 > 1024: the second starts a block; 400 fits behind neither's end within block 0 in
  // registration order, so it follows the second: 1024 + 608 = 1632, ending at 2032.
  const BucketPlan plan = plan_buckets(parameters_of({600, 600, 400}), 1 << 20);
  EXPECT_EQ(plan.offset_of, (std::vector<std::int64_t>{0, 1024, 1632}));
  EXPECT_EQ(plan.buckets[0].numel, 2048);
}

TEST(BucketPlan, OneHugeParameterAmongTinyOnesMakesItsOwnBucket) {
  const auto parameters = parameters_of({3, 100000, 4, 5});
  const BucketPlan plan = plan_buckets(parameters, 8192);
  expect_sound(plan, parameters, 8192);
  EXPECT_EQ(plan.bucket_of, (std::vector<std::int32_t>{0, 1, 2, 2}));
}

TEST(BucketPlan, OneByteGivesEachParameterItsBucket) {
  const auto parameters = parameters_of({3, 2000, 0, 5});
  const BucketPlan plan = plan_buckets(parameters, 1);
  expect_sound(plan, parameters, 1);
  EXPECT_EQ(plan.bucket_of, (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(BucketPlan, TypesAreKeptApartAndNumberedByFirstParameter) {
  auto parameters = parameters_of({10, 20, 30, 40});
  parameters[1].dtype = Dtype::kBFloat16;
  parameters[3].dtype = Dtype::kBFloat16;
  const BucketPlan plan = plan_buckets(parameters, 1 << 20);
  expect_sound(plan, parameters, 1 << 20);
  EXPECT_EQ(plan.bucket_of, (std::vector<std::int32_t>{0, 1, 0, 1}));
  // bf16: 64 bytes are 32 elements. Each bucket is one block: 4,096 and 2,048 bytes, on pages.
  EXPECT_EQ(plan.offset_of, (std::vector<std::int64_t>{0, 0, 16, 32}));
  EXPECT_EQ(plan.flat_bytes, 8192);
}

TEST(BucketPlan, DependsOnSizesTypesAndBytesOnly) {
  const std::vector<std::int64_t> numels = {5, 3000, 17, 0, 1024, 600, 600};
  auto parameters = parameters_of(numels);
  const BucketPlan plan = plan_buckets(parameters, 10000);
  for (ParameterInfo& info : parameters) {
    info.name = "other." + info.name;
    info.shape = {1, info.numel};
  }
  const BucketPlan again = plan_buckets(parameters, 10000);
  EXPECT_EQ(plan.bucket_of, again.bucket_of);
  EXPECT_EQ(plan.offset_of, again.offset_of);
  EXPECT_EQ(plan.flat_bytes, again.flat_bytes);
}

TEST(BucketPlan, DescribesEachParameterInALine) {
  std::vector<ParameterInfo> parameters;
  parameters.push_back({"tower.weight", {2, 3}, 6, Dtype::kFloat32});
  parameters.push_back({"scale", {}, 1, Dtype::kBFloat16});
  EXPECT_EQ(describe(parameters),
            (std::vector<std::string>{"tower.weight fp32 [2, 3]", "scale bf16 []"}));
}

// DeepSpeed 8279: params [8], [0], [24]; an empty one between and at the end.
TEST(Cases, E1_EmptyParametersTakeNoSpaceButHaveAPlace) {
  const auto parameters = parameters_of({8, 0, 24, 0});
  const BucketPlan plan = plan_buckets(parameters, 1 << 20);
  expect_sound(plan, parameters, 1 << 20);
  ASSERT_EQ(plan.buckets.size(), 1U);
  EXPECT_EQ(plan.buckets[0].numel, kBlock);
  EXPECT_EQ(plan.offset_of[0], 0);
  EXPECT_EQ(plan.offset_of[2], 16) << "right behind [8], on the next 64 bytes";
  const auto empties = parameters_of({0, 0});
  expect_sound(plan_buckets(empties, 1 << 20), empties, 1 << 20);
}

// TransformerEngine 3418: planning must be linear in the number of parameters.
TEST(Cases, E3_TwentyOneThousandScalarsPlanInMilliseconds) {
  for (const std::size_t count : {std::size_t{21000}, std::size_t{100000}}) {
    const auto parameters = parameters_of(std::vector<std::int64_t>(count, 1));
    for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{25} << 20}) {
      const double start = thread_cpu_seconds();
      const BucketPlan plan = plan_buckets(parameters, bucket_bytes);
      const double took = thread_cpu_seconds() - start;
      expect_sound(plan, parameters, bucket_bytes);
      // Milliseconds when it is linear; a quadratic plan of 100,000 takes many seconds. Time of
      // this thread, so that a busy machine does not fail the test.
      EXPECT_LT(took, 1.0) << count;
    }
    // A scalar takes 64 bytes: 64 of them a block of 4,096 bytes.
    const BucketPlan plan = plan_buckets(parameters, std::int64_t{1} << 30);
    ASSERT_EQ(plan.buckets.size(), 1U);
    EXPECT_EQ(plan.buckets[0].numel, static_cast<std::int64_t>((count + 63) / 64) * kBlock);
  }
}

}  // namespace
}  // namespace tandem::zero
