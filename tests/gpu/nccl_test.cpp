// The real NCCL, as far as one GPU goes: a communicator of one rank that sends to itself.
#include "comm/nccl_library.h"
#include "kernels/cuda_device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

namespace tandem::comm {
namespace {

using kernels::Dtype;
using kernels::Priority;

constexpr std::size_t kNumel = 100'003;

class NcclOfOne : public testing::Test {
 protected:
  void SetUp() override {
    communicator = nccl->join(nccl->unique_id(), {0, 1}, soon());
    std::vector<float> values(kNumel);
    for (std::size_t i = 0; i < kNumel; ++i) values[i] = static_cast<float>(i % 977);
    device->copy(*stream, from.get(), values.data(), kNumel * sizeof(float));
    finish();
  }

  static Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }
  void finish() {
    ASSERT_TRUE(stream->record().wait_until(soon().at));
    communicator->check();
  }
  [[nodiscard]] std::vector<float> read(const std::shared_ptr<std::byte>& memory) {
    std::vector<float> values(kNumel);
    device->copy(*stream, values.data(), memory.get(), kNumel * sizeof(float));
    finish();
    return values;
  }

  std::unique_ptr<kernels::Device> device = kernels::make_cuda_device(0);
  std::unique_ptr<kernels::Stream> stream = device->make_stream(Priority::kHigh);
  std::shared_ptr<std::byte> from = device->allocate(kNumel * sizeof(float));
  std::shared_ptr<std::byte> to = device->allocate(kNumel * sizeof(float));
  std::unique_ptr<Nccl> nccl = make_nccl_library(0);
  std::unique_ptr<NcclCommunicator> communicator;
};

TEST_F(NcclOfOne, SendsToItself) {
  communicator->group_start();
  communicator->send(from.get(), kNumel, Dtype::kFloat32, 0, *stream);
  communicator->receive(to.get(), kNumel, Dtype::kFloat32, 0, *stream);
  communicator->group_end(soon());
  EXPECT_EQ(read(to), read(from));
}

TEST_F(NcclOfOne, CountsHalvesAsHalves) {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    device->zero(*stream, to.get(), kNumel * sizeof(float));
    communicator->group_start();
    communicator->send(from.get(), kNumel, dtype, 0, *stream);
    communicator->receive(to.get(), kNumel, dtype, 0, *stream);
    communicator->group_end(soon());
    const std::vector<float> sent = read(from);
    const std::vector<float> received = read(to);
    EXPECT_EQ(std::memcmp(received.data(), sent.data(), 2 * kNumel), 0);
    EXPECT_EQ(received.back(), 0.0F) << "more than half of the bytes came";
  }
}

TEST_F(NcclOfOne, GathersAndBroadcastsInPlace) {
  const std::vector<float> before = read(from);
  communicator->group_start();
  communicator->all_gather(from.get(), from.get(), kNumel * sizeof(float), *stream);
  communicator->group_end(soon());
  communicator->group_start();
  communicator->broadcast(from.get(), kNumel * sizeof(float), 0, *stream);
  communicator->group_end(soon());
  communicator->group_start();  // of nothing
  communicator->group_end(soon());
  EXPECT_EQ(read(from), before);
}

TEST_F(NcclOfOne, EndsWithWorkUnderWay) {
  for (int k = 0; k < 50; ++k) {
    communicator->group_start();
    communicator->send(from.get(), kNumel, Dtype::kFloat32, 0, *stream);
    communicator->receive(to.get(), kNumel, Dtype::kFloat32, 0, *stream);
    communicator->group_end(soon());
  }
  communicator->abort();
  communicator->abort();
  EXPECT_TRUE(stream->record().wait_until(soon().at));
  EXPECT_THROW(communicator->group_start(), kernels::DeviceError);
}

}  // namespace
}  // namespace tandem::comm
