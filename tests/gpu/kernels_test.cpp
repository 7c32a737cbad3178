// D2 of kernels/device.h on a GPU: every operation gives the CPU's bits, whatever the lengths, the
// starts of the arrays, the mix of types and the number of fragments.
#include "kernels/fold.h"
#include "kernels/norm.h"
#include "kernels/powers.h"
#include "tests/gpu/gpu_rig.h"
#include "tests/kernels/update_rig.h"
#include "tests/kernels/values.h"

#include <algorithm>
#include <optional>
#include <string>

namespace tandem::kernels {
namespace {

class KernelsOnGpu : public OnGpu {
 protected:
  /// Of chosen fragments; fragment f begins at element f % 2 of grads[f].
  void expect_powers_of_the_cpu(FragmentTable& table,
                                const std::vector<std::vector<float>>& grads,
                                const std::vector<UpdateArrays>& arrays,
                                const std::vector<bool>& chosen);
};

TEST_F(KernelsOnGpu, FillsAndZeroesTouchNothingElse) {
  for (const std::int64_t numel : kLengths) {
    for (const std::size_t start : {0U, 1U, 3U}) {
      const std::size_t all = static_cast<std::size_t>(numel) + start + 5;
      const Mirror<float> filled(*gpu, *stream, std::vector<float>(all, 7.0F));
      gpu->fill(*stream, filled.data() + start, -0.0F, numel);
      std::vector<float> expected(all, 7.0F);
      std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(start), numel, -0.0F);
      const std::vector<float> own = filled.read(*stream);
      ASSERT_EQ(first_difference(own.data(), expected.data(), static_cast<std::int64_t>(all)), "")
          << numel << " from " << start;
      gpu->zero(*stream, filled.data() + start, static_cast<std::size_t>(numel) * sizeof(float));
      std::fill_n(expected.begin() + static_cast<std::ptrdiff_t>(start), numel, 0.0F);
      const std::vector<float> zeroed = filled.read(*stream);
      ASSERT_EQ(first_difference(zeroed.data(), expected.data(), static_cast<std::int64_t>(all)),
                "");
    }
  }
}

TEST_F(KernelsOnGpu, WidensEveryHalfExactly) {
  std::vector<std::uint16_t> halves(65536 + 1);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  const Mirror<std::uint16_t> from(*gpu, *stream, halves);
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    for (const std::int64_t start : {0, 1}) {
      const Mirror<float> to(*gpu, *stream, std::vector<float>(65536, 9.0F));
      gpu->widen(*stream, to.data(), from.data() + start, dtype, 65535);
      const std::vector<float> own = to.read(*stream);
      for (std::int64_t i = 0; i < 65535; ++i) {
        const auto bits = static_cast<std::uint16_t>(i + start);
        const float expected =
            dtype == Dtype::kBFloat16 ? to_float(Bf16{bits}) : to_float(Fp16{bits});
        ASSERT_EQ(first_difference(&own[static_cast<std::size_t>(i)], &expected, 1), "")
            << name_of(dtype) << " " << bits;
      }
      EXPECT_EQ(own[65535], 9.0F);
    }
  }
  const std::vector<float> values = random_values(1003, 1, &anything);
  const Mirror<float> fp32(*gpu, *stream, values);
  const Mirror<float> copy(*gpu, *stream, std::vector<float>(1003));
  gpu->widen(*stream, copy.data(), fp32.data(), Dtype::kFloat32, 1003);
  EXPECT_EQ(first_difference(copy.read(*stream).data(), values.data(), 1003), "");
}

TEST_F(KernelsOnGpu, FoldsOfAnyMixAreTheCpus) {
  std::mt19937 random(3);
  for (const std::size_t count : {0U, 1U, 2U, 3U, 5U, 8U, 64U, 65U, 130U}) {
    for (const std::int64_t numel : {1, 3, 1027, 100'003}) {
      if (count > 8 && numel > 2000) continue;
      for (const bool aligned : {true, false}) {
        std::vector<std::vector<float>> floats;
        std::vector<std::vector<std::uint16_t>> halves;
        std::vector<Mirror<float>> own_floats;
        std::vector<Mirror<std::uint16_t>> own_halves;
        std::vector<Slice> slices;
        std::vector<Slice> own_slices;
        floats.reserve(count);
        halves.reserve(count);
        for (std::size_t s = 0; s < count; ++s) {
          const auto dtype = static_cast<Dtype>(random() % 3);
          const std::size_t offset = aligned ? 0 : random() % 4;
          const auto all = numel + static_cast<std::int64_t>(offset);
          if (random() % 5 == 0) {
            slices.push_back({nullptr, dtype});
            own_slices.push_back({nullptr, dtype});
          } else if (dtype == Dtype::kFloat32) {
            floats.push_back(random_values(all, static_cast<std::uint32_t>(s), &anything));
            own_floats.emplace_back(*gpu, *stream, floats.back());
            slices.push_back({floats.back().data() + offset, dtype});
            own_slices.push_back({own_floats.back().data() + offset, dtype});
          } else {
            halves.emplace_back(static_cast<std::size_t>(all));
            for (std::uint16_t& half : halves.back()) half = static_cast<std::uint16_t>(random());
            own_halves.emplace_back(*gpu, *stream, halves.back());
            slices.push_back({halves.back().data() + offset, dtype});
            own_slices.push_back({own_halves.back().data() + offset, dtype});
          }
        }
        const std::size_t start = aligned ? 0 : 1;
        for (const Accumulator state : {Accumulator::kFresh, Accumulator::kContinue}) {
          std::vector<float> expected = random_values(numel + 2, 77, &any_finite);
          const Mirror<float> acc(*gpu, *stream, expected);
          fold(slices, numel, expected.data() + start, state);
          gpu->fold(*stream, own_slices, numel, acc.data() + start, state);
          ASSERT_EQ(first_difference(acc.read(*stream).data(), expected.data(), numel + 2), "")
              << count << " slices, numel " << numel << (aligned ? ", aligned" : "");
        }
      }
    }
  }
}

/// A fragment of the rig on the GPU, guards included.
class GpuFragment {
 public:
  GpuFragment(Device& gpu, Stream& stream, const Fragment& from)
      : storage_(from.storage),
        numel_(from.numel),
        grad_(gpu, stream, from.grad),
        value_(gpu, stream, from.value),
        half_(gpu, stream, from.half),
        remainder_(gpu, stream, from.remainder) {
    for (const Floats& state : from.state) state_.emplace_back(gpu, stream, state);
  }

  /// `begin`: as in the CPU's test of the bodies, 1 is where groups may be moved as one.
  [[nodiscard]] UpdateArrays arrays(int states, std::int64_t begin) const {
    const std::int64_t at = begin + static_cast<std::int64_t>(Fragment::kStart);
    UpdateArrays arrays;
    arrays.numel = numel_ - begin;
    arrays.grad = grad_.data() + at;
    for (int k = 0; k < states; ++k) {
      arrays.state[static_cast<std::size_t>(k)] = state_[static_cast<std::size_t>(k)].data() + at;
    }
    if (storage_ == Storage::kFp32) {
      arrays.param = value_.data() + at;
      return arrays;
    }
    arrays.param = half_.data() + at;
    arrays.param_dtype = storage_ == Storage::kFp16Masters ? Dtype::kFloat16 : Dtype::kBFloat16;
    if (storage_ == Storage::kBf16Remainders) {
      arrays.remainder = remainder_.data() + at;
    } else {
      arrays.master = value_.data() + at;
    }
    return arrays;
  }

  [[nodiscard]] Fragment read(Stream& stream, Fragment like) const {
    like.grad = grad_.read(stream);
    like.value = value_.read(stream);
    like.half = half_.read(stream);
    like.remainder = remainder_.read(stream);
    for (std::size_t k = 0; k < kMaxStates; ++k) like.state[k] = state_[k].read(stream);
    return like;
  }

 private:
  const Storage storage_;
  const std::int64_t numel_;
  const Mirror<float> grad_, value_;
  const Mirror<std::uint16_t> half_, remainder_;
  std::vector<Mirror<float>> state_;
};

Fragment random_fragment(Storage storage,
                         std::int64_t numel,
                         std::uint32_t seed,
                         float (*draw)(std::mt19937&)) {
  Fragment fragment(storage, random_values(numel, seed, draw));
  fragment.grad = Fragment::guarded(random_values(numel, seed + 1, draw));
  for (std::uint32_t k = 0; k < kMaxStates; ++k) {
    fragment.state[k] = Fragment::guarded(random_values(numel, seed + 2 + k, draw));
    for (float& value : fragment.state[k]) {
      if (k != 0) value = std::fabs(value);
    }
  }
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < static_cast<std::size_t>(numel); i += 5) {  // edited parameters
    fragment.half[Fragment::kStart + i] = static_cast<std::uint16_t>(random());
  }
  return fragment;
}

UpdateArrays from(UpdateArrays arrays, std::int64_t begin) {
  arrays.grad += begin;
  arrays.param = static_cast<std::byte*>(arrays.param) +
                 static_cast<std::size_t>(begin) * bytes_of(arrays.param_dtype);
  if (arrays.master != nullptr) arrays.master += begin;
  if (arrays.remainder != nullptr) arrays.remainder += begin;
  for (float*& state : arrays.state) {
    if (state != nullptr) state += begin;
  }
  arrays.numel -= begin;
  return arrays;
}

// One table with every optimizer, storage and start, in two buckets; every seventh fragment is
// skipped.
TEST_F(KernelsOnGpu, UpdatesOfEveryOptimizerAndStorageAreTheCpus) {
  for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
    std::vector<Fragment> expected;
    std::vector<std::int64_t> begins;
    std::vector<std::size_t> kinds;
    const std::size_t count = every_update(1, 0.1, 1.0).size();
    for (std::size_t kind = 0; kind < count; ++kind) {
      for (const Storage storage : kStorages) {
        for (const std::int64_t numel : {1, 5, 133, 2050, 5003}) {
          for (const std::int64_t begin : {0, 1}) {
            if (numel == begin) continue;
            expected.push_back(random_fragment(
                storage, numel, static_cast<std::uint32_t>(7 * expected.size()), draw));
            begins.push_back(begin);
            kinds.push_back(kind);
          }
        }
      }
    }
    std::vector<GpuFragment> own;
    std::vector<UpdateArrays> arrays;
    own.reserve(expected.size());
    for (std::size_t f = 0; f < expected.size(); ++f) {
      own.emplace_back(*gpu, *stream, expected[f]);
      const Update some = every_update(1, 0.1, 1.0)[kinds[f]].update;
      arrays.push_back(own.back().arrays(states_of(some), begins[f]));
    }
    finish(*stream);
    const auto table = gpu->make_table(arrays, {expected.size() / 3, expected.size()});
    for (std::int64_t step = 1; step <= 3; ++step) {
      UpdateRules rules;
      for (const NamedUpdate& named : every_update(step, 1e-2, 0.25)) {
        rules.rules.push_back(named.update);
      }
      for (std::size_t f = 0; f < expected.size(); ++f) {
        const bool skipped = (f + static_cast<std::size_t>(step)) % 7 == 0;
        rules.rule_of.push_back(skipped ? UpdateRules::kSkip : static_cast<std::int32_t>(kinds[f]));
        if (skipped) continue;
        const Update& rule = rules.rules[kinds[f]];
        update(rule, from(expected[f].arrays(states_of(rule)), begins[f]));
      }
      table->set_rules(*stream, std::move(rules));
      table->update(*stream, 0);
      table->update(*stream, 1);
    }
    for (std::size_t f = 0; f < expected.size(); ++f) {
      ASSERT_EQ(own[f].read(*stream, expected[f]).difference(expected[f]), "")
          << every_update(1, 0.1, 1.0)[kinds[f]].name << ", " << name_of(expected[f].storage)
          << ", fragment " << f;
    }
  }
}

// Scalars and short vectors, each with a step count of its own, as frozen and late parameters have
// them.
TEST_F(KernelsOnGpu, ManyTinyFragmentsWithRulesOfTheirOwn) {
  constexpr std::size_t kCount = 10'000;
  std::vector<std::size_t> starts;
  std::vector<std::int64_t> numels;
  std::size_t all = 0;
  for (std::size_t f = 0; f < kCount; ++f) {
    numels.push_back(static_cast<std::int64_t>(1 + f % 70));
    starts.push_back(all);
    all += 80;
  }
  const auto total = static_cast<std::int64_t>(all);
  std::vector<float> grad = random_values(total, 1, &any_finite);
  std::vector<float> param = random_values(total, 2, &any_finite);
  std::vector<float> first(all, 0.0F);
  std::vector<float> second(all, 0.0F);
  const Mirror<float> own_grad(*gpu, *stream, grad);
  const Mirror<float> own_param(*gpu, *stream, param);
  const Mirror<float> own_first(*gpu, *stream, first);
  const Mirror<float> own_second(*gpu, *stream, second);
  finish(*stream);
  std::vector<UpdateArrays> arrays(kCount);
  for (std::size_t f = 0; f < kCount; ++f) {
    arrays[f].grad = own_grad.data() + starts[f];
    arrays[f].param = own_param.data() + starts[f];
    arrays[f].state = {own_first.data() + starts[f], own_second.data() + starts[f], nullptr};
    arrays[f].numel = numels[f];
  }
  const auto table = gpu->make_table(arrays, {kCount / 2, kCount});
  for (std::int64_t step = 1; step <= 5; ++step) {
    UpdateRules rules;
    for (std::size_t f = 0; f < kCount; ++f) {
      const std::int64_t count = step + static_cast<std::int64_t>(f);
      rules.rule_of.push_back(static_cast<std::int32_t>(f));
      rules.rules.emplace_back(
          AdamUpdate<true, false>::at_step(1e-3, 0.9, 0.999, 1e-8, 0.01, count, 1.0));
      UpdateArrays host;
      host.grad = grad.data() + starts[f];
      host.param = param.data() + starts[f];
      host.state = {first.data() + starts[f], second.data() + starts[f], nullptr};
      host.numel = numels[f];
      update(rules.rules.back(), host);
    }
    // Nothing waits between the steps: the pinned copies of the rules must be several.
    table->set_rules(*stream, std::move(rules));
    table->update(*stream, 0);
    table->update(*stream, 1);
  }
  EXPECT_EQ(first_difference(own_param.read(*stream).data(), param.data(), total), "");
  EXPECT_EQ(first_difference(own_second.read(*stream).data(), second.data(), total), "");
}

void KernelsOnGpu::expect_powers_of_the_cpu(FragmentTable& table,
                                            const std::vector<std::vector<float>>& grads,
                                            const std::vector<UpdateArrays>& arrays,
                                            const std::vector<bool>& chosen) {
  const auto for_chosen = [&](const auto& body) {
    for (std::size_t f = 0; f < chosen.size(); ++f) {
      if (chosen[f]) body(grads[f].data() + f % 2, arrays[f].numel);
    }
  };
  std::uint32_t largest = 0;
  for_chosen([&](const float* grad, std::int64_t numel) {
    largest = std::max(largest, largest_magnitude(grad, numel));
  });
  table.find_largest(*stream, chosen);
  finish(*stream);
  EXPECT_EQ(table.largest(), largest);
  for (const double p : {0.5, 1.0, 3.0, 64.0, 65.0}) {
    const Power power = power_of(p, magnitude_of(largest));
    Superaccumulator expected;
    for_chosen([&](const float* grad, std::int64_t numel) {
      add_sum_of_powers(grad, numel, power, expected);
    });
    table.sum_powers(*stream, chosen, power);
    finish(*stream);
    Superaccumulator sum;
    table.add_sum_to(sum);
    if (power.multiply != 0) {  // R3
      EXPECT_TRUE(std::ranges::equal(sum.words(), expected.words())) << "p " << p;
    } else {
      EXPECT_NEAR(sum.value(), expected.value(), 1e-13 * expected.value()) << "p " << p;
      EXPECT_EQ(sum.nonfinite(), expected.nonfinite());
    }
  }
}

TEST_F(KernelsOnGpu, NormsHaveTheCpusWords) {
  for (float (*draw)(std::mt19937&) : {&any_finite, &anything}) {
    std::vector<std::vector<float>> grads;
    std::vector<Mirror<float>> own;
    std::vector<UpdateArrays> arrays;
    for (const std::int64_t numel : kLengths) {
      for (const std::size_t start : {0U, 1U}) {
        grads.push_back(random_values(numel + 1, static_cast<std::uint32_t>(numel + 3), draw));
        own.emplace_back(*gpu, *stream, grads.back());
        UpdateArrays fragment;
        fragment.grad = own.back().data() + start;
        fragment.param = own.back().data() + start;  // not touched by a norm
        fragment.numel = numel;
        arrays.push_back(fragment);
      }
    }
    finish(*stream);
    const auto table = gpu->make_table(arrays, {5, arrays.size()});
    for (const std::size_t stride : {1U, 2U, 3U}) {
      std::vector<bool> chosen(arrays.size(), false);
      Superaccumulator expected;
      for (std::size_t f = 0; f < arrays.size(); f += stride) {
        chosen[f] = true;
        add_sum_of_squares(grads[f].data() + f % 2, arrays[f].numel, expected);
      }
      table->sum_squares(*stream, chosen);
      finish(*stream);
      Superaccumulator sum;
      table->add_sum_to(sum);
      EXPECT_TRUE(std::ranges::equal(sum.words(), expected.words())) << "every " << stride;
      expect_powers_of_the_cpu(*table, grads, arrays, chosen);
    }
  }
}

TEST_F(KernelsOnGpu, EmptyTablesDoNothing) {
  const auto table = gpu->make_table({}, {0, 0});
  table->sum_squares(*stream, {});
  table->set_rules(*stream, {});
  table->update(*stream, 0);
  table->update(*stream, 1);
  finish(*stream);
  Superaccumulator sum;
  table->add_sum_to(sum);
  EXPECT_EQ(sum.value(), 0.0);
}

}  // namespace
}  // namespace tandem::kernels
