// Devices behind their interface: the CPU's calls block, the simulated one's do not, and both give
// the same bits.
#include "kernels/cpu_device.h"
#include "kernels/norm.h"
#include "kernels/powers.h"
#include "kernels/simulated_device.h"
#include "tests/kernels/update_rig.h"
#include "tests/kernels/values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

namespace tandem::kernels {
namespace {

void finish(Stream& stream) {
  ASSERT_TRUE(
      stream.record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
}

std::unique_ptr<Device> slow(std::uint64_t seed) { return make_simulated_device({seed, 500}); }

TEST(CpuDevice, HasDoneItsWorkWhenACallReturns) {
  const auto device = make_cpu_device();
  const auto stream = device->make_stream(Priority::kNormal);
  const auto memory = device->allocate(4 * sizeof(float));
  auto* const values = reinterpret_cast<float*>(memory.get());
  EXPECT_EQ(values[3], 0.0F);
  device->fill(*stream, values, 2.5F, 4);
  EXPECT_EQ(values[3], 2.5F);
  EXPECT_TRUE(stream->record().complete());
  EXPECT_EQ(device->allocate(0), nullptr);
}

TEST(CpuDevice, WidensEveryTypeExactly) {
  const auto device = make_cpu_device();
  ImmediateStream stream;
  float wide[2] = {};
  const Bf16 bf16[2] = {{0x8000}, {0x3FC0}};  // -0, 1.5
  device->widen(stream, wide, bf16, Dtype::kBFloat16, 2);
  EXPECT_TRUE(std::signbit(wide[0]));
  EXPECT_EQ(wide[1], 1.5F);
  const Fp16 fp16[2] = {{0x8000}, {0x3E00}};
  device->widen(stream, wide, fp16, Dtype::kFloat16, 2);
  EXPECT_TRUE(std::signbit(wide[0]));
  EXPECT_EQ(wide[1], 1.5F);
}

TEST(SimulatedDevice, DoesItsWorkLater) {
  const auto device = make_simulated_device({1, 200'000});
  const auto stream = device->make_stream(Priority::kNormal);
  std::vector<float> values(8, 1.0F);
  for (int i = 0; i < 20; ++i) device->fill(*stream, values.data(), 2.0F, 8);
  const Mark mark = stream->record();
  EXPECT_FALSE(mark.complete());  // 20 pauses of 0.1 s on average
  ASSERT_TRUE(mark.wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
  EXPECT_EQ(values[7], 2.0F);
}

TEST(SimulatedDevice, OrdersStreamsByTheirMarks) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const auto device = slow(seed);
    const auto first = device->make_stream(Priority::kNormal);
    const auto second = device->make_stream(Priority::kHigh);
    std::vector<float> source(16, 0.0F);
    std::vector<float> target(16, 0.0F);
    device->fill(*first, source.data(), 3.0F, 16);
    second->wait(first->record());
    device->copy(*second, target.data(), source.data(), 16 * sizeof(float));
    first->wait(second->record());
    device->zero(*first, source.data(), 16 * sizeof(float));
    finish(*first);
    EXPECT_EQ(target[15], 3.0F) << "seed " << seed;
    EXPECT_EQ(source[15], 0.0F);
  }
}

TEST(SimulatedDevice, ShowsAMissingWait) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a race on purpose, as ThreadSanitizer says";
#endif
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const auto device = slow(seed);
    const auto first = device->make_stream(Priority::kNormal);
    const auto second = device->make_stream(Priority::kNormal);
    std::vector<float> source(16, 0.0F);
    std::vector<float> target(16, 0.0F);
    device->fill(*first, source.data(), 3.0F, 16);
    device->copy(*second, target.data(), source.data(), 16 * sizeof(float));  // waits for nothing
    finish(*first);
    finish(*second);
    wrong += target[15] == 3.0F ? 0 : 1;
  }
  EXPECT_GT(wrong, 0);
}

TEST(SimulatedDevice, TellsWhenItsMarksWere) {
  const auto device = make_simulated_device({1, 0});
  const auto stream = device->make_stream(Priority::kNormal);
  const Mark before = stream->record();
  give_simulated_work(*stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  const Mark after = stream->record();
  finish(*stream);
  EXPECT_GE(after.seconds_since(before), 0.020);
}

TEST(SimulatedDevice, FailsWithTheErrorOfItsWork) {
  const auto device = make_simulated_device({});
  const auto stream = device->make_stream(Priority::kNormal);
  give_simulated_work(*stream, [] { throw DeviceError("the wire was cut"); });
  const Mark mark = stream->record();
  EXPECT_THROW(static_cast<void>(
                   mark.wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1))),
               DeviceError);
}

/// Two buckets with fragments of several lengths, updated by two rules, one fragment skipped.
struct Shard {
  std::vector<Fragment> fragments;
  std::vector<std::size_t> ends{2, 4};

  explicit Shard(Storage storage) {
    const std::int64_t sizes[] = {3 * kNormBlock + 5, 7, 64 * kNormBlock, kNormBlock};
    for (std::uint32_t f = 0; f < 4; ++f) {
      const auto numel = static_cast<std::size_t>(sizes[f]);
      Floats values(numel);
      for (std::size_t i = 0; i < numel; ++i) {
        values[i] = static_cast<float>((i * 37 + f) % 101) * 0.01F;
      }
      fragments.emplace_back(storage, values);
      for (std::size_t i = 0; i < numel; ++i) {
        fragments.back().grad[Fragment::kStart + i] =
            static_cast<float>((i * 53 + 11 * f) % 89) * 0.1F - 4.0F;
      }
    }
  }
  std::vector<UpdateArrays> arrays() {
    std::vector<UpdateArrays> all;
    for (Fragment& fragment : fragments) all.push_back(fragment.arrays(2));
    return all;
  }
};

UpdateRules two_rules() {
  return {{AdamUpdate<true, false>::at_step(0.1, 0.9, 0.999, 1e-8, 0.01, 1, 0.5),
           LionUpdate::at_step(0.1, 0.9, 0.99, 0.01, 0.5)},
          {0, 1, UpdateRules::kSkip, 0}};
}

TEST(Devices, UpdateTablesLikeSingleFragments) {
  for (const Storage storage : kStorages) {
    SCOPED_TRACE(name_of(storage));
    Shard expected(storage);
    const UpdateRules rules = two_rules();
    Superaccumulator squares;
    for (std::size_t f = 0; f < 4; ++f) {
      const UpdateArrays arrays = expected.arrays()[f];
      if (f != 1) add_sum_of_squares(arrays.grad, arrays.numel, squares);
      if (f < 2) update(rules.rules[f], arrays);  // the first bucket only
    }
    std::vector<std::unique_ptr<Device>> devices;
    devices.push_back(make_cpu_device());
    devices.push_back(slow(5));
    for (const auto& device : devices) {
      SCOPED_TRACE(device->name());
      Shard shard(storage);
      const auto stream = device->make_stream(Priority::kNormal);
      const auto table = device->make_table(shard.arrays(), shard.ends);
      table->sum_squares(*stream, {true, false, true, true});
      finish(*stream);
      Superaccumulator sum;
      table->add_sum_to(sum);
      EXPECT_EQ(sum.value(), squares.value());
      table->set_rules(*stream, two_rules());
      table->update(*stream, 0);
      finish(*stream);
      for (std::size_t f = 0; f < 4; ++f) {
        EXPECT_EQ(shard.fragments[f].difference(expected.fragments[f]), "") << "fragment " << f;
      }
    }
  }
}

TEST(Devices, TakeNormsOfEveryTypeOfChosenFragments) {
  Shard shard(Storage::kFp32);
  const std::vector<bool> chosen = {true, false, true, true};
  std::uint32_t largest = 0;
  for (std::size_t f = 0; f < 4; ++f) {
    const UpdateArrays arrays = shard.arrays()[f];
    if (chosen[f]) largest = std::max(largest, largest_magnitude(arrays.grad, arrays.numel));
  }
  // Not chosen, and never found: as large as there is.
  for (float& grad : shard.fragments[1].grad) grad = std::numeric_limits<float>::max();
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(make_cpu_device());
  devices.push_back(make_cpu_device([](std::int64_t count, const auto& body) {
    for (std::int64_t i = count; i-- > 0;) body(i, i + 1);
  }));
  devices.push_back(slow(5));
  for (const auto& device : devices) {
    SCOPED_TRACE(device->name());
    const auto stream = device->make_stream(Priority::kNormal);
    const auto table = device->make_table(shard.arrays(), shard.ends);
    for (int turn = 0; turn < 2; ++turn) {  // the second finds nothing of the first
      table->find_largest(*stream, chosen);
      finish(*stream);
      EXPECT_EQ(table->largest(), largest);
      for (const double p : {0.5, 3.0}) {
        const Power power = power_of(p, magnitude_of(largest));
        Superaccumulator expected;
        for (std::size_t f = 0; f < 4; ++f) {
          const UpdateArrays arrays = shard.arrays()[f];
          if (chosen[f]) add_sum_of_powers(arrays.grad, arrays.numel, power, expected);
        }
        table->sum_powers(*stream, chosen, power);
        finish(*stream);
        Superaccumulator sum;
        table->add_sum_to(sum);
        EXPECT_EQ(sum.value(), expected.value());
      }
    }
    table->find_largest(*stream, {false, false, false, false});
    finish(*stream);
    EXPECT_EQ(table->largest(), 0U);
  }
}

}  // namespace
}  // namespace tandem::kernels
