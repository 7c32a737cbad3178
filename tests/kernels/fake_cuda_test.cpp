// The host's side of the CUDA device on a runtime without a GPU (tests/kernels/fake_cuda.h): what
// is made current, what is given back, what an error says. The GPU's own tests (tests/gpu) run on
// it, too.
#include "tests/kernels/fake_cuda.h"

#include "kernels/cuda_device.h"
#include "kernels/superaccumulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace tandem::kernels {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void finish(Stream& stream) {
  ASSERT_TRUE(
      stream.record().wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
}

int current_device() {
  int device = -1;
  EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
  return device;
}

void use(Device& device) {
  const auto stream = device.make_stream(Priority::kHigh);
  const auto memory = device.allocate(4096);
  device.fill(*stream, reinterpret_cast<float*>(memory.get()), 1.0F, 1024);
  finish(*stream);
}

// G1. Without the look at contexts, every rank would hold one on GPU 0.
TEST(FakeCuda, AThreadThatUsedNoDeviceMakesNoContextOnTheFirst) {
  std::thread([] {
    fake_cuda::forget_contexts();
    ASSERT_EQ(current_device(), 0);
    const auto device = make_cuda_device(1);
    use(*device);
    EXPECT_FALSE(fake_cuda::has_context(0));
    EXPECT_EQ(current_device(), 1);
  }).join();
}

TEST(FakeCuda, TheCurrentDeviceStaysWhatItWas) {
  std::thread([] {
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);  // has a context from here on
    const auto device = make_cuda_device(1);
    EXPECT_EQ(current_device(), 0);
    use(*device);
    EXPECT_EQ(current_device(), 0);
  }).join();
}

TEST(FakeCuda, EverythingIsGivenBack) {
  const fake_cuda::Held before = fake_cuda::held();
  {
    Mark mark;
    std::shared_ptr<std::byte> memory;
    std::unique_ptr<FragmentTable> table;
    {
      const auto device = make_cuda_device(0);
      const auto stream = device->make_stream(Priority::kNormal);
      memory = device->allocate(1000);
      const auto host = device->allocate_host(1000);
      UpdateArrays arrays;
      arrays.grad = reinterpret_cast<float*>(memory.get());
      arrays.param = memory.get();
      arrays.numel = 10;
      table = device->make_table({arrays}, {1});
      for (int turn = 0; turn < 100; ++turn) table->sum_squares(*stream, {true});
      for (int turn = 0; turn < 100; ++turn) mark = stream->record();
      finish(*stream);
    }
    EXPECT_NE(fake_cuda::held(), before);
    EXPECT_TRUE(mark.complete());
  }
  EXPECT_EQ(fake_cuda::held(), before);
}

TEST(FakeCuda, EventsAreUsedAgain) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream(Priority::kNormal);
  const std::size_t before = fake_cuda::held().events;
  for (int turn = 0; turn < 1000; ++turn) {
    const Mark mark = stream->record();
    finish(*stream);
  }
  EXPECT_LE(fake_cuda::held().events, before + 3);
}

TEST(FakeCuda, NotReadyIsNoErrorAndIsNotLeftBehind) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream(Priority::kNormal);
  int not_ready = 0;
  for (int turn = 0; turn < 50; ++turn) {
    const Mark mark = stream->record();
    if (!mark.complete()) ++not_ready;
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_TRUE(mark.wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1)));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  EXPECT_GT(not_ready, 0);  // each was recorded some 30 us before it could be complete
}

std::string what(const std::function<void()>& call) {
  try {
    call();
  } catch (const DeviceError& error) {
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "somebody else would find it";
    return error.what();
  }
  return "nothing was thrown";
}

TEST(FakeCuda, ErrorsNameTheCallAndWhatToDo) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream(Priority::kNormal);
  const auto memory = device->allocate(64);
  const Mark mark = stream->record();
  fake_cuda::fail_next(cudaErrorIllegalAddress);
  EXPECT_THAT(what([&] { static_cast<void>(mark.complete()); }),
              AllOf(HasSubstr("cudaEventQuery: "), HasSubstr("cudaErrorIllegalAddress"),
                    HasSubstr("restart it from the last checkpoint")));
  fake_cuda::fail_next(cudaErrorLaunchFailure);
  EXPECT_THAT(what([&] { device->zero(*stream, memory.get(), 64); }),
              HasSubstr("cudaMemsetAsync: "));
  static_cast<void>(stream->record());  // leaves an event in the pool
  fake_cuda::fail_next(cudaErrorLaunchFailure);
  EXPECT_THAT(what([&] { static_cast<void>(stream->record()); }), HasSubstr("cudaEventRecord: "));
  EXPECT_THAT(what([&] { static_cast<void>(device->allocate(std::size_t{1} << 50)); }),
              AllOf(HasSubstr("cuda:0"), HasSubstr("1125899906842624 bytes"),
                    HasSubstr("1 of 2 are free")));
  EXPECT_THAT(what([&] { static_cast<void>(make_cuda_device(2)); }),
              AllOf(HasSubstr("cuda:2"), HasSubstr("sees 2 GPUs")));
  finish(*stream);
}

TEST(FakeCuda, AnEventIsNotLostWhenRecordingFails) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream(Priority::kNormal);
  finish(*stream);
  const std::size_t events = fake_cuda::held().events;
  for (int turn = 0; turn < 5; ++turn) {
    fake_cuda::fail_next(cudaErrorLaunchFailure);
    EXPECT_THROW(static_cast<void>(stream->record()), DeviceError);
  }
  EXPECT_LE(fake_cuda::held().events, events);
}

TEST(FakeCuda, GpusAreToldApart) {
  EXPECT_EQ(cuda_device_count(), 2);
  EXPECT_EQ(cuda_device_identity(0), "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff at 0000:00:00.0");
  EXPECT_NE(cuda_device_identity(1), cuda_device_identity(0));
}

// A1: the pinned flags and rules of a step are not written again before their copy is done.
TEST(FakeCuda, AHostFarAheadOverwritesNoUpload) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream(Priority::kNormal);
  const auto memory = device->allocate(2 * sizeof(float));
  auto* const param = reinterpret_cast<float*>(memory.get());
  const auto grad = device->allocate(2 * sizeof(float));
  device->fill(*stream, reinterpret_cast<float*>(grad.get()), 1.0F, 2);
  std::vector<UpdateArrays> arrays(2);
  for (std::size_t f = 0; f < 2; ++f) {
    arrays[f].grad = reinterpret_cast<const float*>(grad.get()) + f;
    arrays[f].param = param + f;
    arrays[f].numel = 1;
  }
  const auto table = device->make_table(arrays, {1, 2});
  // Step k takes 2^k from the first, and on even k from the second: all sums are exact below 2^24.
  float expected[2] = {0.0F, 0.0F};
  for (int k = 0; k < 20; ++k) {
    const double rate = static_cast<double>(1 << k);
    const bool both = k % 2 == 0;
    table->set_rules(*stream, {{SgdUpdate<false, false>::at_step(rate, 0.0, 0.0, 0.0, 1, 1.0)},
                               {0, both ? 0 : UpdateRules::kSkip}});
    table->update(*stream, 0);
    table->update(*stream, 1);
    expected[0] -= static_cast<float>(rate);
    if (both) expected[1] -= static_cast<float>(rate);
  }
  const auto host = device->allocate_host(2 * sizeof(float));
  device->copy(*stream, host.get(), param, 2 * sizeof(float));
  finish(*stream);
  EXPECT_EQ(reinterpret_cast<const float*>(host.get())[0], expected[0]);
  EXPECT_EQ(reinterpret_cast<const float*>(host.get())[1], expected[1]);
}

}  // namespace
}  // namespace tandem::kernels
