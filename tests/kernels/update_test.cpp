// U1 to U3 of kernels/update.h: every optimizer, every way of storing parameters, the same bits on
// every instruction set. What the formulas are is tested in optimizers_test.cpp.
#include "kernels/update.h"

#include "kernels/cpu_kernels.h"
#include "tests/kernels/update_rig.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace tandem::kernels {
namespace {

/// Values in and around the range of fp16: exponents -30 to 20.
float around_fp16(std::mt19937& random) {
  const double unit = 1.0 + static_cast<double>(random()) / 4294967296.0;
  const double size = std::ldexp(unit, static_cast<int>(random() % 51) - 30);
  return static_cast<float>(random() % 2 == 0 ? size : -size);
}

/// A fragment with random contents; every fifth 16-bit parameter is edited behind the update's
/// back.
Fragment random_fragment(Storage storage, std::int64_t numel, float (*draw)(std::mt19937&)) {
  Fragment fragment(storage, random_values(numel, 1, draw));
  fragment.grad = Fragment::guarded(random_values(numel, 2, draw));
  for (std::uint32_t k = 0; k < kMaxStates; ++k) {
    fragment.state[k] = Fragment::guarded(random_values(numel, 3 + k, draw));
    for (float& value : fragment.state[k]) {  // some of them are averages of squares
      if (k != 0) value = std::fabs(value);
    }
  }
  std::mt19937 random(9);
  for (std::size_t i = 0; i < static_cast<std::size_t>(numel); i += 5) {
    fragment.half[Fragment::kStart + i] = static_cast<std::uint16_t>(random());
  }
  return fragment;
}

/// What U3 and kernels/masters.h say, one element after another.
void run_by_definition(const Update& update, Fragment& fragment) {
  const auto count = static_cast<std::size_t>(states_of(update));
  for (std::size_t i = Fragment::kStart; i + 1 < fragment.value.size(); ++i) {
    const Storage storage = fragment.storage;
    float start = fragment.value[i];
    if (storage == Storage::kBf16Remainders) {
      start = join_master(Bf16{fragment.half[i]}, fragment.remainder[i]);
    } else if (storage != Storage::kFp32 && rounded_bits(storage, start) != fragment.half[i]) {
      start = value_of_bits(storage, fragment.half[i]);
    }
    float state[kMaxStates] = {};
    for (std::size_t k = 0; k < count; ++k) state[k] = fragment.state[k][i];
    float updated = std::visit(
        [&](const auto& functor) { return functor(start, fragment.grad[i], state); }, update);
    for (std::size_t k = 0; k < count; ++k) fragment.state[k][i] = state[k];
    if (storage == Storage::kFp32) {
      fragment.value[i] = updated;
      continue;
    }
    if (std::isnan(updated)) updated = std::bit_cast<float>(0x7FC00000U);
    fragment.half[i] = rounded_bits(storage, updated);
    if (storage == Storage::kBf16Remainders) {
      fragment.remainder[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(updated));
    } else {
      fragment.value[i] = updated;
    }
  }
}

TEST(Update, EveryIsaGivesTheBitsOfTheDefinition) {
  std::vector<NamedUpdate> updates = every_update(3, 1e-3, 0.125);
  for (NamedUpdate& first : every_update(1, 0.7, -3.0)) updates.push_back(std::move(first));
  for (const NamedUpdate& named : updates) {
    for (const Storage storage : kStorages) {
      for (float (*draw)(std::mt19937&) : {&any_finite, &anything, &around_fp16}) {
        for (const std::int64_t numel : kLengths) {
          if (numel > 2000 && draw == &anything) continue;
          const Fragment start =
              random_fragment(storage, std::min<std::int64_t>(numel, 10'007), draw);
          Fragment expected = start;
          run_by_definition(named.update, expected);
          for (const Isa isa : available_isas()) {
            Fragment own = start;
            const UpdateArrays arrays = own.arrays(states_of(named.update));
            std::visit(
                [&](const auto& functor) {
                  cpu_kernels(isa).update[named.update.index()](&functor, arrays);
                },
                named.update);
            ASSERT_EQ(own.difference(expected), "") << named.name << ", " << name_of(storage)
                                                    << ", " << name_of(isa) << ", numel " << numel;
          }
        }
      }
    }
  }
}

// The public call does what the table does, and needs no state where an optimizer has none.
TEST(Update, TheCallRunsTheRightFunctor) {
  for (const NamedUpdate& named : every_update(2, 0.01, 1.0)) {
    Fragment own = random_fragment(Storage::kFp32, 1000, &around_fp16);
    Fragment expected = own;
    run_by_definition(named.update, expected);
    update(named.update, own.arrays(states_of(named.update)));
    EXPECT_EQ(own.difference(expected), "") << named.name;
  }
}

TEST(Update, SaysHowManyStatesItHas) {
  const int expected[] = {2, 3, 2, 3, 0, 1, 1, 1, 2, 2, 3, 1, 1};  // as optimizers.h lists them
  const std::vector<NamedUpdate> updates = every_update(1, 0.1, 1.0);
  ASSERT_EQ(updates.size(), std::variant_size_v<Update>);
  for (std::size_t i = 0; i < updates.size(); ++i) {
    EXPECT_EQ(updates[i].update.index(), i);
    EXPECT_EQ(states_of(updates[i].update), expected[i]) << updates[i].name;
  }
}

// M1 of kernels/masters.h: every optimizer, over 60 steps in which values also overflow and fail.
TEST(Update, RemaindersAndSeparateMastersGiveTheSameBits) {
  const std::int64_t numel = 1003;
  for (float (*draw)(std::mt19937&) : {&around_fp16, &anything}) {
    const Floats start = random_values(numel, 7, draw);
    for (std::size_t u = 0; u < std::variant_size_v<Update>; ++u) {
      Fragment separate(Storage::kBf16Masters, start);
      Fragment joined(Storage::kBf16Remainders, start);
      for (std::int64_t step = 1; step <= 60; ++step) {
        const NamedUpdate named = every_update(step, 1e-3, 1.0)[u];
        separate.grad =
            Fragment::guarded(random_values(numel, 50 + static_cast<std::uint32_t>(step), draw));
        joined.grad = separate.grad;
        update(named.update, separate.arrays(states_of(named.update)));
        update(named.update, joined.arrays(states_of(named.update)));
        ASSERT_EQ(separate.half, joined.half) << named.name << ", step " << step;
        for (std::int64_t i = 0; i < numel; ++i) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(separate.master(i)),
                    std::bit_cast<std::uint32_t>(joined.master(i)))
              << named.name << ", step " << step << ", element " << i;
        }
      }
    }
  }
}

/// One step of plain SGD with a rate and gradients of 1/4: value - 1/16, exact in what follows.
void take_a_sixteenth(Fragment& fragment) {
  std::fill_n(fragment.grad.begin() + Fragment::kStart, fragment.numel, 0.25F);
  update(SgdUpdate<false, false>::at_step(0.25, 0.0, 0.0, 0.0, 1, 1.0), fragment.arrays(0));
}

// M3. The master, 1 + 2^-20, shows neither in bf16 nor in fp16.
TEST(Update, AnEditedParameterWinsOverItsSeparateMaster) {
  for (const Storage storage : {Storage::kBf16Masters, Storage::kFp16Masters}) {
    Fragment fragment(storage, Floats(100, 1.0F + 0x1p-20F));
    for (std::size_t i = 0; i < 100; i += 2) {
      fragment.half[Fragment::kStart + i] = rounded_bits(storage, i % 4 == 0 ? -2.0F : 0.0F);
    }
    take_a_sixteenth(fragment);
    for (std::int64_t i = 0; i < 100; ++i) {
      const float edited = i % 4 == 0 ? -2.0F : 0.0F;
      const float start = i % 2 == 0 ? edited : 1.0F + 0x1p-20F;
      EXPECT_EQ(fragment.master(i), start - 0.0625F) << name_of(storage) << ", element " << i;
      EXPECT_EQ(fragment.half[Fragment::kStart + static_cast<std::size_t>(i)],
                rounded_bits(storage, start - 0.0625F));
    }
  }
}

// M3. Half a unit in the last place of a bf16 value in [1, 2) is 2^-8, and it is there whatever the
// remainder was. Zeros, also of what was below its rounded value, are zeros: 1 + 0xFFFF 2^-23 has
// the remainder 0xFFFF.
TEST(Update, AnEditedParameterWinsOverItsRemainderWithinHalfAUnit) {
  for (const std::uint32_t remainder : {0U, 1U, 0x7FFFU, 0x8000U, 0xFFFFU}) {
    const float start = std::bit_cast<float>(0x3F800000U + remainder);
    Fragment fragment(Storage::kBf16Remainders, Floats{start, start, start, start});
    const float edits[] = {-1.5F, 0.0F, -0.0F, start};
    for (std::size_t i = 0; i < 3; ++i) {
      fragment.half[Fragment::kStart + i] = round_half_away(edits[i]).bits;
    }
    take_a_sixteenth(fragment);
    EXPECT_NEAR(fragment.master(0), -1.5625, 0x1p-8) << remainder;
    EXPECT_EQ(fragment.master(1), -0.0625F) << remainder;
    EXPECT_EQ(fragment.master(2), -0.0625F) << remainder;
    EXPECT_EQ(fragment.master(3), start - 0.0625F) << remainder;
  }
}

TEST(Update, AParameterRepairedFromNanGoesOn) {
  for (const Storage storage :
       {Storage::kBf16Masters, Storage::kBf16Remainders, Storage::kFp16Masters}) {
    Fragment fragment(storage, Floats(40, std::numeric_limits<float>::quiet_NaN()));
    take_a_sixteenth(fragment);
    EXPECT_TRUE(std::isnan(fragment.master(0)));
    fragment.half[Fragment::kStart] = rounded_bits(storage, 2.0F);
    take_a_sixteenth(fragment);
    EXPECT_EQ(fragment.master(0), 1.9375F) << name_of(storage);
    EXPECT_TRUE(std::isnan(fragment.master(1)));
  }
}

TEST(Update, AnEmptyFragmentIsNothing) {
  for (const NamedUpdate& named : every_update(1, 0.1, 1.0)) update(named.update, UpdateArrays{});
  SUCCEED();
}

TEST(Isa, ChoosesTheBestAndRefusesWhatIsNotThere) {
  const std::vector<Isa> isas = available_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), Isa::kBaseline);
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
  EXPECT_EQ(current_isa(), isas.back());
  select_isa(Isa::kBaseline);
  EXPECT_EQ(current_isa(), Isa::kBaseline);
  EXPECT_EQ(&cpu_kernels(), &cpu_kernels(Isa::kBaseline));
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (std::find(isas.begin(), isas.end(), isa) == isas.end()) {
      EXPECT_THROW(select_isa(isa), std::invalid_argument);
    }
  }
  select_isa(isas.back());
}

}  // namespace
}  // namespace tandem::kernels
