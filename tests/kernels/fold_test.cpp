// F1 to F3 of kernels/fold.h, and the same bits on every instruction set.
#include "kernels/fold.h"

#include "kernels/cpu_kernels.h"
#include "kernels/fp16.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

namespace tandem::kernels {
namespace {

/// Slices with their memory. They start one element after an aligned address.
struct Slices {
  std::vector<std::vector<float>> wide;
  std::vector<std::vector<std::uint16_t>> narrow;
  std::vector<Slice> all;

  Slices(const std::vector<Dtype>& dtypes,
         std::int64_t numel,
         float (*draw)(std::mt19937&),
         std::uint32_t seed) {
    wide.resize(dtypes.size());
    narrow.resize(dtypes.size());
    for (std::size_t s = 0; s < dtypes.size(); ++s) {
      wide[s] = random_values(numel + 1, seed + static_cast<std::uint32_t>(s), draw);
      if (dtypes[s] == Dtype::kFloat32) {
        all.push_back({wide[s].data() + 1, dtypes[s]});
        continue;
      }
      for (const float value : wide[s]) {
        narrow[s].push_back(dtypes[s] == Dtype::kFloat16 ? round_half_even(value).bits
                                                         : round_half_away(value).bits);
      }
      all.push_back({narrow[s].data() + 1, dtypes[s]});
    }
  }
};

float element(const Slice& slice, std::int64_t i) {
  if (slice.data == nullptr) return 0.0F;
  if (slice.dtype == Dtype::kFloat32) return static_cast<const float*>(slice.data)[i];
  if (slice.dtype == Dtype::kFloat16) return to_float(static_cast<const Fp16*>(slice.data)[i]);
  return to_float(static_cast<const Bf16*>(slice.data)[i]);
}

/// The definition, one element after another.
std::vector<float> folded(const std::vector<Slice>& slices,
                          std::vector<float> acc,
                          Accumulator state) {
  for (std::size_t i = 0; i < acc.size(); ++i) {
    float sum = state == Accumulator::kFresh ? 0.0F : acc[i];
    for (const Slice& slice : slices) sum += element(slice, static_cast<std::int64_t>(i));
    acc[i] = sum;
  }
  return acc;
}

constexpr Dtype kF = Dtype::kFloat32;
constexpr Dtype kB = Dtype::kBFloat16;
constexpr Dtype kH = Dtype::kFloat16;

TEST(Fold, EveryIsaGivesTheBitsOfTheDefinition) {
  const std::vector<std::vector<Dtype>> mixes = {{},
                                                 {kB},
                                                 {kF},
                                                 {kB, kB},
                                                 {kF, kF},
                                                 {kB, kB, kB},
                                                 {kF, kB},
                                                 {kB, kB, kB, kB},
                                                 {kB, kF, kB},
                                                 {kF, kF, kF, kF},
                                                 {kF, kF, kF},
                                                 {kB, kB, kB, kB, kB},
                                                 {kH},
                                                 {kH, kH},
                                                 {kH, kH, kH, kF},
                                                 {kH, kB, kF, kH},
                                                 {kB, kH, kH, kH, kH, kH, kB},
                                                 {kB, kB, kB, kF, kF, kB, kB, kB, kB, kB, kB}};
  const float guard = 12345.0F;
  for (const std::vector<Dtype>& mix : mixes) {
    for (const std::int64_t numel : kLengths) {
      if (numel > 2000 && mix.size() % 2 != 0) continue;  // long ones: half of the mixes will do
      for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
        const Slices slices(mix, numel, draw, 17);
        for (const Accumulator state : {Accumulator::kFresh, Accumulator::kContinue}) {
          const std::vector<float> before =
              state == Accumulator::kFresh
                  ? std::vector<float>(static_cast<std::size_t>(numel),
                                       std::numeric_limits<float>::quiet_NaN())
                  : random_values(numel, 99, draw);
          const std::vector<float> expected = folded(slices.all, before, state);
          for (const Isa isa : available_isas()) {
            std::vector<float> acc = before;
            acc.insert(acc.begin(), 3, guard);  // an odd start, and nothing written around it
            acc.push_back(guard);
            cpu_kernels(isa).fold(slices.all.data(), static_cast<std::int64_t>(slices.all.size()),
                                  numel, acc.data() + 3, state);
            ASSERT_EQ(first_difference(acc.data() + 3, expected.data(), numel), "")
                << name_of(isa) << ", " << mix.size() << " slices, numel " << numel;
            ASSERT_EQ(acc[2], guard);
            ASSERT_EQ(acc.back(), guard);
          }
        }
      }
    }
  }
}

// F1
TEST(Fold, DoesNotDependOnWhereARangeIsCut) {
  const std::int64_t numel = 10'007;
  const Slices slices({kB, kF, kB, kB, kB, kB}, numel, &any_finite, 5);
  std::vector<float> whole(static_cast<std::size_t>(numel));
  fold(slices.all, numel, whole.data(), Accumulator::kFresh);
  for (const std::int64_t cut : {1, 31, 2048, 4097, 10'006}) {
    std::vector<float> parts(static_cast<std::size_t>(numel));
    std::vector<Slice> rest = slices.all;
    for (Slice& slice : rest) {
      slice.data = static_cast<const char*>(slice.data) +
                   cut * static_cast<std::int64_t>(bytes_of(slice.dtype));
    }
    fold(rest, numel - cut, parts.data() + cut, Accumulator::kFresh);
    fold(slices.all, cut, parts.data(), Accumulator::kFresh);
    EXPECT_EQ(first_difference(parts.data(), whole.data(), numel), "") << "cut at " << cut;
  }
}

// F2: 2^24 + 1 is no fp32 value and rounds to 2^24, so the order shows in the sum.
TEST(Fold, AddsInTheOrderOfTheSlices) {
  const float big = 0x1p24F, one = 1.0F, minus = -0x1p24F;
  const auto sum = [](float start, std::vector<const float*> values) {
    std::vector<Slice> slices;
    for (const float* value : values) slices.push_back({value, kF});
    float acc = start;
    fold(slices, 1, &acc, Accumulator::kContinue);
    return acc;
  };
  EXPECT_EQ(sum(0.0F, {&big, &one, &minus}), 0.0F);
  EXPECT_EQ(sum(0.0F, {&big, &minus, &one}), 1.0F);
  EXPECT_EQ(sum(big, {&one, &minus}), 0.0F);
  EXPECT_EQ(sum(big, {&minus, &one}), 1.0F);
  // Across the groups in which a fold goes over its slices: (((2^24 + 1) + 1) + ...) stays.
  EXPECT_EQ(sum(big, {&one, &one, &one, &one, &one, &minus}), 0.0F);
}

// F3
TEST(Fold, SlicesWithoutDataAreZeros) {
  for (const std::int64_t numel : {1, 33, 5000}) {
    const Slices slices({kB, kF, kB}, numel, &any_finite, 8);
    std::vector<Slice> holes = {{nullptr, kB}, slices.all[0], {nullptr, kF}, slices.all[1],
                                slices.all[2], {nullptr, kF}, {nullptr, kB}};
    std::vector<float> acc(static_cast<std::size_t>(numel), -1.0F);
    fold(holes, numel, acc.data(), Accumulator::kFresh);
    const std::vector<float> expected = folded(slices.all, acc, Accumulator::kFresh);
    EXPECT_EQ(first_difference(acc.data(), expected.data(), numel), "");
  }
}

TEST(Fold, FreshWithoutDataIsZero) {
  const std::vector<Slice> none(9, Slice{nullptr, kB});
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{9}}) {
    std::vector<float> acc(5000, 7.0F);
    fold(std::span(none).first(count), 5000, acc.data(), Accumulator::kFresh);
    EXPECT_EQ(acc, std::vector<float>(5000, 0.0F));
    acc.assign(5000, 7.0F);
    fold(std::span(none).first(count), 5000, acc.data(), Accumulator::kContinue);
    EXPECT_EQ(acc, std::vector<float>(5000, 7.0F));
  }
}

// F3 rests on this: had a fresh sum kept -0, adding an absent slice (skipped) and one of zeros
// (-0 + 0 = +0) would differ.
TEST(Fold, FreshSumsAreNeverMinusZero) {
  const std::vector<float> minus_zero(100, -0.0F);
  const std::vector<std::uint16_t> narrow(100, 0x8000);
  for (const Slice slice :
       {Slice{minus_zero.data(), kF}, Slice{narrow.data(), kB}, Slice{narrow.data(), kH}}) {
    const std::vector<Slice> slices(2, slice);
    std::vector<float> acc(100, -1.0F);
    fold(slices, 100, acc.data(), Accumulator::kFresh);
    for (const float value : acc) EXPECT_EQ(std::bit_cast<std::uint32_t>(value), 0U);
  }
}

// In bf16 256 + 1 is 256: a sum of 301 ones that is ever rounded to bf16 stops there (300 would
// still be a bf16 value, 301 is not).
TEST(Fold, ManyBf16OnesAreCountedExactly) {
  const std::vector<Bf16> ones(64, round_half_away(1.0F));
  const std::vector<Slice> slice(1, Slice{ones.data(), kB});
  std::vector<float> acc(64);
  for (int pass = 0; pass < 301; ++pass) {
    fold(slice, 64, acc.data(), pass == 0 ? Accumulator::kFresh : Accumulator::kContinue);
  }
  EXPECT_EQ(acc, std::vector<float>(64, 301.0F));

  const std::vector<Slice> slices(301, Slice{ones.data(), kB});
  fold(slices, 64, acc.data(), Accumulator::kFresh);
  EXPECT_EQ(acc, std::vector<float>(64, 301.0F));
}

TEST(Multiply, IsThePlainProductOfEveryElementAndTouchesNothingElse) {
  for (const Isa isa : available_isas()) {
    const CpuKernels& table = cpu_kernels(isa);
    for (const std::int64_t numel : {0, 1, 7, 1023, 4099}) {
      for (const float factor : {0.5F, -3.0F, 0.0F, 0x1p-140F, 1.0F / 3.0F}) {
        std::vector<float> x = random_values(numel + 2, 5, any_finite);
        const std::vector<float> before = x;
        table.multiply(x.data() + 1, factor, numel);
        EXPECT_EQ(x.front(), before.front());
        EXPECT_EQ(x.back(), before.back());
        for (std::int64_t i = 1; i <= numel; ++i) {
          const auto at = static_cast<std::size_t>(i);
          ASSERT_EQ(x[at], before[at] * factor) << name_of(isa) << " " << numel << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tandem::kernels
