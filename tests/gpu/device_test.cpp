// M1 and M2 of kernels/stream.h and the memory of kernels/device.h on a GPU.
#include "tests/gpu/gpu_rig.h"
#include "tests/kernels/values.h"

#include <algorithm>
#include <string>
#include <thread>

namespace tandem::kernels {
namespace {

class DeviceOnGpu : public OnGpu {};

TEST_F(DeviceOnGpu, SaysWhoItIs) {
  EXPECT_EQ(gpu->name(), "cuda:0");
  const std::string identity = cuda_device_identity(0);
  // GPU-8-4-4-4-12 at domain:bus:device.function
  EXPECT_EQ(identity.substr(0, 4), "GPU-");
  EXPECT_EQ(identity.substr(40, 4), " at ");
  EXPECT_GE(identity.size(), 44U + 12U);
  EXPECT_EQ(cuda_device_identity(0), identity);
  EXPECT_THROW(static_cast<void>(make_cuda_device(cuda_device_count())), DeviceError);
  EXPECT_THROW(static_cast<void>(make_cuda_device(-1)), DeviceError);
}

TEST_F(DeviceOnGpu, MemoryIsZeroAndAligned) {
  EXPECT_EQ(gpu->allocate(0), nullptr);
  EXPECT_EQ(gpu->allocate_host(0), nullptr);
  constexpr std::size_t kBytes = 10'000'003;
  for (int turn = 0; turn < 3; ++turn) {
    const auto memory = gpu->allocate(kBytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.get()) % 64, 0U);
    const auto host = gpu->allocate_host(kBytes);
    EXPECT_TRUE(std::all_of(host.get(), host.get() + kBytes,
                            [](std::byte b) { return b == std::byte{0}; }));
    std::fill_n(host.get(), kBytes, std::byte{1});
    gpu->copy(*stream, host.get(), memory.get(), kBytes);
    gpu->fill(*stream, reinterpret_cast<float*>(memory.get()), 3.0F, kBytes / 4);  // for the next
    finish(*stream);
    EXPECT_TRUE(std::all_of(host.get(), host.get() + kBytes,
                            [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST_F(DeviceOnGpu, TooMuchMemoryIsAnErrorThatLeavesNothingBehind) {
  EXPECT_THROW(static_cast<void>(gpu->allocate(std::size_t{1} << 50)), OutOfDeviceMemory);
  const auto memory = gpu->allocate(4096);
  gpu->fill(*stream, reinterpret_cast<float*>(memory.get()), 1.0F, 1024);
  finish(*stream);
}

TEST_F(DeviceOnGpu, OrdersStreamsByTheirMarks) {
  constexpr std::int64_t kNumel = std::int64_t{1} << 25;  // 128 MiB: a fill takes some 30 us
  const auto second = gpu->make_stream(Priority::kHigh);
  const auto source = gpu->allocate(kNumel * sizeof(float));
  const auto target = gpu->allocate(kNumel * sizeof(float));
  const auto host = gpu->allocate_host(kNumel * sizeof(float));
  auto* const from = reinterpret_cast<float*>(source.get());
  auto* const to = reinterpret_cast<float*>(target.get());
  const auto* const read = reinterpret_cast<const float*>(host.get());
  for (int turn = 0; turn < 10; ++turn) {
    const auto value = static_cast<float>(turn + 2);
    for (int k = 0; k < 20; ++k) gpu->fill(*stream, from, -1.0F, kNumel);
    gpu->fill(*stream, from, value, kNumel);
    second->wait(stream->record());
    gpu->copy(*second, to, from, kNumel * sizeof(float));
    stream->wait(second->record());
    gpu->fill(*stream, from, -2.0F, kNumel);
    gpu->copy(*second, host.get(), to, kNumel * sizeof(float));
    finish(*second);
    EXPECT_EQ(std::count(read, read + kNumel, value), kNumel) << "turn " << turn;
  }
  finish(*stream);
}

TEST_F(DeviceOnGpu, MarksAreCompleteWhenTheirWorkIsAndKnowTheTime) {
  constexpr std::int64_t kNumel = std::int64_t{1} << 28;  // 1 GiB
  const auto memory = gpu->allocate(kNumel * sizeof(float));
  auto* const data = reinterpret_cast<float*>(memory.get());
  const Mark begin = stream->record();
  for (int k = 0; k < 50; ++k) gpu->fill(*stream, data, 1.0F, kNumel);
  const Mark end = stream->record();
  // 50 GiB cannot have been written yet, at any speed known: 20 TB/s would take 2.7 ms.
  EXPECT_FALSE(end.complete());
  EXPECT_FALSE(end.wait_until(std::chrono::steady_clock::now()));
  finish(*stream);
  EXPECT_TRUE(begin.complete());
  EXPECT_TRUE(end.complete());
  EXPECT_GT(end.seconds_since(begin), 1e-3);
  EXPECT_LT(end.seconds_since(begin), 60.0);
}

TEST_F(DeviceOnGpu, MarksSurviveTheirStreamAndDevice) {
  Mark mark;
  {
    const auto own = make_cuda_device(0);
    mark = own->make_stream(Priority::kNormal)->record();
  }
  EXPECT_TRUE(mark.wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
}

TEST_F(DeviceOnGpu, MarksByTheThousandShareEvents) {
  std::vector<Mark> marks;
  for (int k = 0; k < 5000; ++k) marks.push_back(stream->record());
  finish(*stream);
  for (const Mark& mark : marks) ASSERT_TRUE(mark.complete());
  marks.clear();
  for (int k = 0; k < 20'000; ++k) static_cast<void>(stream->record());
  finish(*stream);
}

TEST_F(DeviceOnGpu, OtherThreadsMayUseIt) {
  const auto memory = gpu->allocate(1024 * sizeof(float));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto own = gpu->make_stream(Priority::kNormal);
      auto* const part = reinterpret_cast<float*>(memory.get()) + 256 * t;
      for (int k = 0; k < 200; ++k) gpu->fill(*own, part, static_cast<float>(t), 256);
      EXPECT_TRUE(
          own->record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto host = gpu->allocate_host(1024 * sizeof(float));
  gpu->copy(*stream, host.get(), memory.get(), 1024 * sizeof(float));
  finish(*stream);
  for (std::size_t i = 0; i < 1024; ++i) {
    ASSERT_EQ(reinterpret_cast<const float*>(host.get())[i], static_cast<float>(i / 256));
  }
}

TEST_F(DeviceOnGpu, ACallersStreamIsTheSameOrderOfWork) {
  const auto same = wrap_cuda_stream(*gpu, native_cuda_stream(*stream));
  EXPECT_EQ(same->id(), stream->id());
  EXPECT_NE(gpu->make_stream(Priority::kNormal)->id(), stream->id());
  const auto memory = gpu->allocate(4096);
  const auto host = gpu->allocate_host(4096);
  auto* const data = reinterpret_cast<float*>(memory.get());
  for (int k = 0; k < 100; ++k) {
    gpu->fill(*stream, data, 1.0F, 1024);
    gpu->fill(*same, data, 2.0F, 1024);
  }
  gpu->copy(*stream, host.get(), data, 4096);
  finish(*same);
  EXPECT_EQ(reinterpret_cast<const float*>(host.get())[1023], 2.0F);
  // The default stream, which LibTorch uses unless told otherwise.
  const auto standard = wrap_cuda_stream(*gpu, 0);
  EXPECT_EQ(native_cuda_stream(*standard), 0U);
  gpu->fill(*standard, data, 5.0F, 1024);
  stream->wait(standard->record());
  gpu->copy(*stream, host.get(), data, 4096);
  finish(*stream);
  EXPECT_EQ(reinterpret_cast<const float*>(host.get())[0], 5.0F);
}

TEST_F(DeviceOnGpu, WhatIsOfAnotherKindIsRefused) {
  ImmediateStream immediate;
  EXPECT_THROW(gpu->zero(immediate, nullptr, 4), DeviceError);
  class Other final : public Mark::State {
   public:
    [[nodiscard]] bool complete() const override { return true; }
    [[nodiscard]] double seconds_since(const State& /*earlier*/) const override { return 0.0; }
  };
  EXPECT_THROW(stream->wait(Mark(std::make_shared<Other>())), DeviceError);
}

}  // namespace
}  // namespace tandem::kernels
