// N21 at the public kernels: one rank or thread has set flush-to-zero, another has not; results
// must have the same bits, those with denormals kept.
#include "kernels/denormals.h"

#include "kernels/cpu_kernels.h"
#include "kernels/fold.h"
#include "kernels/norm.h"
#include "kernels/powers.h"
#include "tests/kernels/update_rig.h"

#include <gtest/gtest.h>

#include <algorithm>

#if defined(__SSE__)

namespace tandem::kernels {
namespace {

/// The calling thread flushes denormals, given and produced, while this lives.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040U); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

/// Denormals, zeros and the smallest normals, of either sign.
float tiny(std::mt19937& random) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x80FFFFFFU);
}

bool is_denormal(float x) {
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU;
  return magnitude != 0 && magnitude < 0x00800000U;
}

bool same_bits(const Floats& a, const Floats& b) {
  return first_difference(a.data(), b.data(), static_cast<std::int64_t>(a.size())).empty();
}

TEST(Cases, N21_DenormalsAreKeptWhateverTheThreadsMode) {
  const std::int64_t numel = 1003;
  const Isa best = current_isa();
  for (const Isa isa : available_isas()) {
    select_isa(isa);
    for (const Storage storage : kStorages) {
      Fragment start(storage, random_values(numel, 1, &tiny));
      start.grad = Fragment::guarded(random_values(numel, 2, &tiny));
      for (std::uint32_t k = 0; k < kMaxStates; ++k) {
        start.state[k] = Fragment::guarded(random_values(numel, 3 + k, &tiny));
        for (float& value : start.state[k]) value = std::fabs(value);
      }
      // Rates that leave the parameters as tiny as the gradients are.
      for (const NamedUpdate& named : every_update(2, 1e-38, 1.0)) {
        Fragment kept = start, flushing = start, unguarded = start;
        update(named.update, kept.arrays(states_of(named.update)));
        {
          const FlushDenormals flush;
          update(named.update, flushing.arrays(states_of(named.update)));
          std::visit(
              [&](const auto& functor) {
                cpu_kernels(isa).update[named.update.index()](
                    &functor, unguarded.arrays(states_of(named.update)));
              },
              named.update);
        }
        const std::string where =
            named.name + ", " + name_of(storage) + ", " + std::string(name_of(isa));
        EXPECT_EQ(flushing.difference(kept), "") << where;
        EXPECT_NE(unguarded.difference(kept), "") << where << ": the mode does nothing here";
        EXPECT_TRUE(std::any_of(kept.value.begin(), kept.value.end(), is_denormal)) << where;
      }
    }
  }
  select_isa(best);
}

TEST(Cases, N21_DenormalsAreKeptInSumsWhateverTheThreadsMode) {
  const std::int64_t numel = 1003;
  const Floats wide = random_values(numel, 1, &tiny);
  std::vector<Bf16> bf16;
  std::vector<Fp16> fp16;
  for (const float value : wide) {
    bf16.push_back(round_half_away(value));
    fp16.push_back(Fp16{static_cast<std::uint16_t>(bf16.size() % 0x400)});  // fp16's denormals
  }
  const Isa best = current_isa();
  for (const Isa isa : available_isas()) {
    select_isa(isa);
    // fp16's denormals are normal in fp32: each type on its own, so that none hides the other.
    for (const Slice slice :
         {Slice{wide.data(), Dtype::kFloat32}, Slice{bf16.data(), Dtype::kBFloat16},
          Slice{fp16.data(), Dtype::kFloat16}}) {
      Floats kept(wide.size()), flushing(wide.size());
      fold({&slice, 1}, numel, kept.data(), Accumulator::kFresh);
      {
        const FlushDenormals flush;
        fold({&slice, 1}, numel, flushing.data(), Accumulator::kFresh);
      }
      EXPECT_TRUE(same_bits(kept, flushing)) << name_of(isa) << ", " << name_of(slice.dtype);
      EXPECT_EQ(std::any_of(kept.begin(), kept.end(), is_denormal), slice.dtype != Dtype::kFloat16);
    }
    Floats unguarded(wide.size());
    const Slice slice{wide.data(), Dtype::kFloat32};
    {
      const FlushDenormals flush;
      cpu_kernels(isa).fold(&slice, 1, numel, unguarded.data(), Accumulator::kFresh);
    }
    EXPECT_FALSE(std::any_of(unguarded.begin(), unguarded.end(), is_denormal))
        << "the mode does nothing here";
  }
  select_isa(best);
}

// 1,000 squares of the smallest denormal, and their 3-norm: 10 of them.
TEST(Cases, N21_DenormalsAreKeptInTheNormWhateverTheThreadsMode) {
  const Floats x(1000, 0x1p-149F);
  const Isa best = current_isa();
  for (const Isa isa : available_isas()) {
    select_isa(isa);
    Superaccumulator sum;
    double block = 0.0, unguarded = 1.0;
    Superaccumulator cubes;
    const Power cube = power_of(3.0, 0x1p-149);
    {
      const FlushDenormals flush;
      EXPECT_EQ(largest_magnitude(x.data(), 1000), 1U);
      add_sum_of_powers(x.data(), 1000, cube, cubes);
      add_sum_of_squares(x.data(), 1000, sum);
      block = block_sum_of_squares(x.data(), 1000);
      unguarded = cpu_kernels(isa).block_sum_of_squares(x.data(), 1000);
    }
    EXPECT_EQ(sum.value(), 1000 * 0x1p-298) << name_of(isa);
    EXPECT_EQ(block, 1000 * 0x1p-298) << name_of(isa);
    EXPECT_DOUBLE_EQ(norm_of(cubes.value(), cube), 10 * 0x1p-149) << name_of(isa);
    EXPECT_EQ(unguarded, 0.0) << "the mode does nothing here";
  }
  select_isa(best);
}

TEST(Denormals, TheThreadsModeIsGivenBack) {
  const unsigned before = _mm_getcsr();
  for (const unsigned mode : {0x0000U, 0x0040U, 0x8000U, 0x8040U}) {
    _mm_setcsr((before & ~0x8040U) | mode);
    unsigned inside = 0;
    {
      const KeepDenormals keep;
      inside = _mm_getcsr();
    }
    const unsigned after = _mm_getcsr();
    EXPECT_EQ(inside & 0x8040U, 0U);
    EXPECT_EQ(after & 0x8040U, mode);
  }
  _mm_setcsr(before);
}

}  // namespace
}  // namespace tandem::kernels

#endif
