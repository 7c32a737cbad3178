// Where engines may be, and what is said where they may not.
#include "kernels/cuda_device.h"
#include "tests/support/number.h"
#include "tests/support/thread_world.h"
#include <tandem/tandem.h>

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace tandem::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

NamedTensors tensors_on(const std::vector<at::DeviceType>& devices) {
  NamedTensors tensors;
  for (const at::DeviceType device : devices) {
    tensors.push_back({"w" + std::to_string(tensors.size()),
                       torch::empty({2}, torch::TensorOptions(device)).requires_grad_()});
  }
  return tensors;
}

TEST(Devices, WithoutAGpuSayWhatIsMissing) {
  if (kernels::cuda_device_count() > 0) {
    GTEST_SKIP() << "this machine has a GPU";
  }
  on_ranks(patient(), [](World& world) {
    EXPECT_THAT([&] { static_cast<void>(world.gpu()); },
                ThrowsMessage<DeviceError>(AnyOf(HasSubstr("configure it with TANDEM_CUDA=ON"),
                                                 HasSubstr("the CUDA driver shows no GPU"))));
    // Nothing has changed.
    ScaleEngine net = number(world, "net");
    sgd_step(world, net, 1.0);
  });
}

TEST(Devices, RefuseOthersThanTheCpuAndGpus) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THAT(refusal([&] { const Engine net(world, tensors_on({at::kMeta}), {.name = "net"}); }),
                HasSubstr("engine 'net': its parameters are on meta; engines train on the CPU and "
                          "on CUDA devices"));
    ScaleEngine net = number(world, "net");
    sgd_step(world, net, 1.0);
  });
}

TEST(Devices, RefuseAnEngineOnTwo) {
  on_ranks(patient(), [](World& world) {
    EXPECT_THAT(refusal([&] {
                  const Engine net(world, tensors_on({at::kCPU, at::kMeta}), {.name = "net"});
                }),
                HasSubstr("parameter 'w1' is on meta, the parameters before it are on cpu"));
    ScaleEngine net = number(world, "net");
    sgd_step(world, net, 1.0);
  });
}

TEST(Devices, RefuseAnEngineThatIsElsewhereOnAnotherRank) {
  on_ranks(
      patient(),
      [](World& world) {
        const at::DeviceType mine = world.rank() == 1 ? at::kMeta : at::kCPU;
        EXPECT_THROW((Engine(world, tensors_on({mine}), {.name = "net"})), Mismatch);
        ScaleEngine net = number(world, "net");
        sgd_step(world, net, 1.0);
      },
      2);
}

// Both communicate: the reductions on the queue's thread, the new engine's values on the user's.
TEST(Devices, AnEngineMadeBehindABackwardComesAfterItsReductions) {
  WorldOptions options = patient();
  options.queue_delay_us = 2000;
  on_ranks(options, [](World& world) {
    for (int turn = 0; turn < 5; ++turn) {
      Engine first(world, mlp(1), {.name = "first", .bucket_bytes = 1});
      first.forward(torch::ones({4, 8})).sum().backward();
      ScaleEngine second = number(world, "second", 2.0 + turn);
      EXPECT_TRUE(world.step().applied);
      sgd_step(world, second, 1.0);
    }
  });
}

}  // namespace
}  // namespace tandem::testing
