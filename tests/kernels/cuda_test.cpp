// G3 of kernels/cuda_device.h, and what a build with CUDA says on a machine without a GPU. That
// this program starts at all shows that nothing in it needs one to be loaded.
#include "kernels/cpu_device.h"
#include "kernels/cuda_device.h"
#include "kernels/nvtx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

namespace tandem::kernels {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// What the DeviceError that `call` throws says.
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Cuda, TheBuildIsAsConfigured) { EXPECT_EQ(cuda_built(), TANDEM_TEST_CUDA_BUILT == 1); }

TEST(Cuda, ABuildWithoutItSaysHowToHaveIt) {
  if (cuda_built()) GTEST_SKIP() << "built with CUDA";
  EXPECT_EQ(cuda_device_count(), 0);
  const auto cpu = make_cpu_device();
  ImmediateStream stream;
  const auto how = HasSubstr("built without CUDA: configure with TANDEM_CUDA=ON");
  EXPECT_THAT(refusal([] { static_cast<void>(make_cuda_device(3)); }),
              AllOf(HasSubstr("cuda:3"), how));
  EXPECT_THAT(refusal([] { static_cast<void>(cuda_device_identity(0)); }), how);
  EXPECT_THAT(refusal([&] { static_cast<void>(wrap_cuda_stream(*cpu, 0)); }), how);
  EXPECT_THAT(refusal([&] { static_cast<void>(native_cuda_stream(stream)); }), how);
}

TEST(Cuda, WithoutAGpuTheDriversCallIsNamed) {
  if (!cuda_built()) GTEST_SKIP() << "built without CUDA";
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  for (int turn = 0; turn < 2; ++turn) {  // an error stays nobody's
    EXPECT_EQ(cuda_device_count(), 0);
    const std::string text = refusal([] { static_cast<void>(make_cuda_device(0)); });
    EXPECT_THAT(text, AllOf(HasSubstr("cudaGetDeviceCount"), HasSubstr("see nvidia-smi")));
    EXPECT_THAT(refusal([] { static_cast<void>(cuda_device_identity(0)); }),
                AllOf(HasSubstr("cudaGetDeviceProperties"), HasSubstr("see nvidia-smi")));
  }
}

TEST(Cuda, WhatIsOfAnotherDeviceIsRefused) {
  if (!cuda_built()) GTEST_SKIP() << "built without CUDA";
  const auto cpu = make_cpu_device();
  ImmediateStream stream;
  EXPECT_THAT(refusal([&] { static_cast<void>(wrap_cuda_stream(*cpu, 0)); }),
              HasSubstr("cpu is no CUDA device"));
  EXPECT_THAT(refusal([&] { static_cast<void>(native_cuda_stream(stream)); }),
              HasSubstr("another kind of stream"));
}

TEST(Cuda, RangesOfAProfilerNestWithoutOne) {
  const ProfilerRange outer("outer");
  const ProfilerRange inner("inner");
}

}  // namespace
}  // namespace tandem::kernels
