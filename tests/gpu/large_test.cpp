// Sizes beyond 32 bits: 2^32 + 1 fp32 elements in one parameter, more than 2^31 in a bucket. Not
// run where the GPU has no 36 GiB left.
#include "tests/gpu/gpu_rig.h"

#include <algorithm>
#include <bit>

namespace tandem::kernels {
namespace {

constexpr std::int64_t kHuge = (std::int64_t{1} << 32) + 1;

class LargeOnGpu : public OnGpu {
 protected:
  /// Null where memory does not suffice.
  std::shared_ptr<std::byte> memory(std::int64_t numel, std::size_t element) {
    try {
      return gpu->allocate(static_cast<std::size_t>(numel) * element);
    } catch (const OutOfDeviceMemory&) {
      return nullptr;
    }
  }
  /// Every element is compared where an index could wrap: at both ends, around 2^31 and around
  /// 2^32.
  void expect(const float* data, std::int64_t numel, float value) {
    constexpr std::int64_t kWindow = std::int64_t{1} << 22;
    const auto host = gpu->allocate_host(kWindow * sizeof(float));
    const auto* const read = reinterpret_cast<const float*>(host.get());
    for (const std::int64_t middle :
         {std::int64_t{0}, std::int64_t{1} << 31, std::int64_t{1} << 32, numel}) {
      const std::int64_t begin = std::clamp<std::int64_t>(middle - kWindow / 2, 0, numel - kWindow);
      gpu->copy(*stream, host.get(), data + begin, kWindow * sizeof(float));
      finish(*stream);
      EXPECT_EQ(std::count(read, read + kWindow, value), kWindow) << "from element " << begin;
    }
  }
};

TEST_F(LargeOnGpu, OneParameterOfMoreThan32Bits) {
  const auto grad_memory = memory(kHuge, sizeof(float));
  const auto param_memory = grad_memory == nullptr ? nullptr : memory(kHuge, sizeof(float));
  if (param_memory == nullptr) GTEST_SKIP() << "not run: less than 32 GiB are free";
  auto* const grad = reinterpret_cast<float*>(grad_memory.get());
  auto* const param = reinterpret_cast<float*>(param_memory.get());
  gpu->fill(*stream, grad, 2.0F, kHuge);
  gpu->fill(*stream, param, 5.0F, kHuge);
  expect(grad, kHuge, 2.0F);
  UpdateArrays arrays;
  arrays.grad = grad;
  arrays.param = param;
  arrays.numel = kHuge;
  const auto table = gpu->make_table({arrays}, {1});
  table->sum_squares(*stream, {true});
  finish(*stream);
  Superaccumulator sum;
  table->add_sum_to(sum);
  EXPECT_EQ(sum.value(), 4.0 * static_cast<double>(kHuge));  // exact: 2^34 + 4
  table->set_rules(*stream, {{SgdUpdate<false, false>::at_step(0.5, 0.0, 0.0, 0.0, 1, 1.0)}, {0}});
  table->update(*stream, 0);
  expect(param, kHuge, 4.0F);  // 5 - 0.5 * 2
  const Slice slices[] = {{param, Dtype::kFloat32}, {param, Dtype::kFloat32}};
  gpu->fold(*stream, slices, kHuge, grad, Accumulator::kContinue);
  expect(grad, kHuge, 10.0F);  // 2 + 4 + 4
}

TEST_F(LargeOnGpu, ACastOfMoreThan32Bits) {
  const auto half_memory = memory(kHuge, 2);
  const auto wide_memory = half_memory == nullptr ? nullptr : memory(kHuge, sizeof(float));
  if (wide_memory == nullptr) GTEST_SKIP() << "not run: less than 24 GiB are free";
  // Two bf16 of 2 side by side are the fp32 number with the bits 0x40004000.
  gpu->fill(*stream, reinterpret_cast<float*>(half_memory.get()), std::bit_cast<float>(0x40004000U),
            kHuge / 2);
  auto* const wide = reinterpret_cast<float*>(wide_memory.get());
  gpu->widen(*stream, wide, half_memory.get(), Dtype::kBFloat16, kHuge - 1);
  expect(wide, kHuge - 1, 2.0F);
}

TEST_F(LargeOnGpu, ABucketOfMoreThan31Bits) {
  constexpr std::int64_t kEach = std::int64_t{1} << 30;
  const auto grad_memory = memory(3 * kEach, sizeof(float));
  const auto param_memory = grad_memory == nullptr ? nullptr : memory(3 * kEach, sizeof(float));
  if (param_memory == nullptr) GTEST_SKIP() << "not run: less than 24 GiB are free";
  auto* const grad = reinterpret_cast<float*>(grad_memory.get());
  auto* const param = reinterpret_cast<float*>(param_memory.get());
  gpu->fill(*stream, grad, 1.0F, 3 * kEach);
  std::vector<UpdateArrays> arrays(3);
  for (std::size_t f = 0; f < 3; ++f) {
    arrays[f].grad = grad + static_cast<std::int64_t>(f) * kEach;
    arrays[f].param = param + static_cast<std::int64_t>(f) * kEach;
    arrays[f].numel = kEach;
  }
  const auto table = gpu->make_table(arrays, {3});
  table->set_rules(*stream,
                   {{SgdUpdate<false, false>::at_step(0.25, 0.0, 0.0, 0.0, 1, 1.0)}, {0, 0, 0}});
  table->update(*stream, 0);
  expect(param, 3 * kEach, -0.25F);
}

}  // namespace
}  // namespace tandem::kernels
