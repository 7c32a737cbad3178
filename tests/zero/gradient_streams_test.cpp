// test.zero.gradient_streams: gradient buckets on a device's streams: what waits for what, and what
// is kept until when. Streams are held up where a missing wait would show, so that each test fails
// every time without it.
#include "kernels/simulated_device.h"
#include "tests/support/fake_channel.h"
#include "tests/support/gate.h"
#include "zero/gradient_buckets.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

namespace tandem::zero {
namespace {

using kernels::Dtype;
using kernels::Marks;
using kernels::Stream;
using test_support::Gate;

constexpr Dtype kF = Dtype::kFloat32;
constexpr std::int64_t kNumel = 6;

std::chrono::steady_clock::time_point soon() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

bool is_held_up(Stream& stream) { return test_support::is_held_up(stream.record()); }

/// Of `marks`, those that stand for work of streams that are held up.
std::int64_t held_up(const Marks& marks) {
  return std::count_if(marks.begin(), marks.end(), test_support::is_held_up);
}

/// A device on which LibTorch is at whichever stream a test says.
class ThreeStreams final : public TorchDevice {
 public:
  ThreeStreams() {
    for (auto& stream : streams_) stream = device_->make_stream(kernels::Priority::kNormal);
  }
  ~ThreeStreams() override { finish(); }
  ThreeStreams(const ThreeStreams&) = delete;
  ThreeStreams& operator=(const ThreeStreams&) = delete;
  ThreeStreams(ThreeStreams&&) = delete;
  ThreeStreams& operator=(ThreeStreams&&) = delete;

  [[nodiscard]] Stream& stream(std::size_t index) { return *streams_[index]; }
  void use(std::size_t index) { current_ = index; }
  void finish() {
    for (const auto& stream : streams_) {
      EXPECT_TRUE(stream->record().wait_until(soon()));
    }
  }

  std::function<void()> before = [] {};  // before_torch()

  [[nodiscard]] kernels::Device& device() override { return *device_; }
  [[nodiscard]] Stream& current() override { return *streams_[current_]; }
  void before_torch() override {
    before();
    EXPECT_TRUE(current().record().wait_until(soon()));
  }
  void keep(const at::Tensor& tensor) override {
    kernels::give_simulated_work(current(), [tensor] {});
  }
  [[nodiscard]] bool holds(const at::Tensor& tensor) const override {
    return tensor.device().is_cpu();
  }
  [[nodiscard]] at::Tensor tensor_over(std::byte* data,
                                       std::span<const std::int64_t> sizes,
                                       Dtype dtype,
                                       std::shared_ptr<void> owner) const override {
    return zero::tensor_over(data, sizes, dtype, std::move(owner));
  }

 private:
  const std::unique_ptr<kernels::Device> device_ = kernels::make_simulated_device({});
  std::unique_ptr<Stream> streams_[3];
  std::size_t current_ = 0;
};

/// Staging that others may still use, all of it kept.
class BusyChannel final : public test_support::FakeChannel {
 public:
  using FakeChannel::FakeChannel;
  comm::Staging acquire(std::size_t bytes) override {
    memory_.emplace_back(bytes / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    return {reinterpret_cast<std::byte*>(memory_.back().data()), bytes, 0, users};
  }
  void give_back(comm::Staging staging) override { returned.push_back(std::move(staging)); }

  /// Of the last acquire().
  [[nodiscard]] std::vector<float>& last() { return memory_.back(); }

  Marks users;  // of what acquire() gives
  std::vector<comm::Staging> returned;

 private:
  std::vector<std::vector<float>> memory_;
};

class GradientStreams : public ::testing::Test {
 protected:
  /// `parameters` of kNumel elements each, in one bucket.
  void make(std::size_t parameters, Dtype dtype) {
    std::vector<ParameterInfo> infos;
    for (std::size_t i = 0; i < parameters; ++i) {
      infos.push_back({"p" + std::to_string(i), {kNumel}, kNumel, dtype});
    }
    plan_ = plan_buckets(infos, 1 << 20);
    channel_ = std::make_unique<BusyChannel>(GradientBuckets::channel_spec(plan_, "test"));
    buckets_ = std::make_unique<GradientBuckets>(plan_, *channel_, device_);
  }
  [[nodiscard]] at::Tensor read(const Contribution& contribution, std::size_t parameter) {
    device_.finish();
    return torch::from_blob(
               reinterpret_cast<float*>(contribution.staging.data) + plan_.offset_of[parameter],
               {kNumel})
        .clone();
  }

  BucketPlan plan_;
  std::unique_ptr<BusyChannel> channel_;
  ThreeStreams device_;
  std::unique_ptr<GradientBuckets> buckets_;
};

at::Tensor full(float value) { return torch::full({kNumel}, value); }
at::Tensor bf16(float value) { return full(value).to(at::kBFloat16); }

TEST_F(GradientStreams, AStreamAddsOnlyToWhatAnotherHasWritten) {
  make(1, kF);
  const at::Tensor one = full(1.0F);
  const at::Tensor two = full(2.0F);
  Gate gate(device_.stream(0));
  buckets_->put_main(0, one, true);
  device_.use(1);
  buckets_->put_main(0, two, true);
  EXPECT_TRUE(is_held_up(device_.stream(1)));
  gate.open();
  EXPECT_TRUE(torch::equal(read(buckets_->take_main(0, kF), 0), full(3.0F)));
}

TEST_F(GradientStreams, NothingIsWrittenBeforeTheMemorysLastUse) {
  make(2, kF);
  const at::Tensor one = full(1.0F);
  Gate gate(device_.stream(2));
  channel_->users = {device_.stream(2).record()};
  buckets_->put_main(0, one, false);
  EXPECT_TRUE(is_held_up(device_.stream(0)));
  device_.use(1);
  const Contribution taken = buckets_->take_main(0, kF);  // zeros for the other parameter
  EXPECT_TRUE(is_held_up(device_.stream(1)));
  gate.open();
  EXPECT_TRUE(torch::equal(read(taken, 0), full(1.0F)));
  EXPECT_TRUE(torch::equal(read(taken, 1), full(0.0F)));
}

// What no kernel of ours copies, LibTorch does.
TEST_F(GradientStreams, LibTorchComesAfterTheMemorysLastUseToo) {
  make(1, kF);
  Gate gate(device_.stream(2));
  kernels::give_simulated_work(device_.stream(2), [&] {
    std::fill(channel_->last().begin(), channel_->last().end(), 9.0F);
  });
  channel_->users = {device_.stream(2).record()};
  device_.before = [&] { gate.open(); };
  buckets_->put_main(0, torch::full({2 * kNumel}, 1.0F).slice(0, 0, 2 * kNumel, 2), false);
  gate.open();
  EXPECT_TRUE(torch::equal(read(buckets_->take_main(0, kF), 0), full(1.0F)));
}

// Zeros are written on a stream that has not written into the bucket before.
TEST_F(GradientStreams, WhatIsTakenSaysWhoWroteIt) {
  make(3, kF);
  const at::Tensor one = full(1.0F);
  Gate first(device_.stream(0));
  Gate second(device_.stream(1));
  buckets_->put_main(0, one, false);
  device_.use(1);
  buckets_->put_main(1, one, false);
  device_.use(2);
  const Contribution taken = buckets_->take_main(0, kF);
  EXPECT_EQ(held_up(taken.staging.pending), 3);
}

TEST_F(GradientStreams, WhatIsDiscardedSaysWhoWroteIt) {
  make(1, kF);
  const at::Tensor one = full(1.0F);
  Gate gate(device_.stream(0));
  buckets_->put_main(0, one, false);
  buckets_->discard();
  ASSERT_EQ(channel_->returned.size(), 1U);
  EXPECT_EQ(held_up(channel_->returned[0].pending), 1);
}

/// A gradient whose memory becomes NaN when it is freed.
at::Tensor perishable(float value, std::vector<float>& memory, bool& freed) {
  memory.assign(kNumel, value);
  freed = false;
  return torch::from_blob(
      memory.data(), {kNumel},
      [&memory, &freed](void*) {
        freed = true;
        std::fill(memory.begin(), memory.end(), std::numeric_limits<float>::quiet_NaN());
      },
      at::kFloat);
}

TEST_F(GradientStreams, GradientsAreKeptUntilTheyWereRead) {
  make(2, kF);
  std::vector<float> memory[3];
  bool freed[3];
  Gate gate(device_.stream(0));
  buckets_->put_main(0, perishable(1.0F, memory[0], freed[0]), false);
  buckets_->put_main(1, perishable(2.0F, memory[1], freed[1]), true);
  buckets_->put_main(1, perishable(3.0F, memory[2], freed[2]), true);  // added
  for (const bool gone : freed) EXPECT_FALSE(gone);
  gate.open();
  const Contribution taken = buckets_->take_main(0, kF);
  EXPECT_TRUE(torch::equal(read(taken, 0), full(1.0F)));
  EXPECT_TRUE(torch::equal(read(taken, 1), full(5.0F)));
  for (const bool gone : freed) EXPECT_TRUE(gone);
}

// The copy in fp32 reads what one stream wrote, writes where another one worked, and whoever is
// given either memory next hears of it.
TEST_F(GradientStreams, WideningWaitsForBothMemories) {
  make(1, Dtype::kBFloat16);
  const at::Tensor half = bf16(1.5F);
  {
    Gate gate(device_.stream(0));
    buckets_->put_main(0, half, false);
    device_.use(1);
    const Contribution taken = buckets_->take_main(0, kF);
    EXPECT_TRUE(is_held_up(device_.stream(1)));
    EXPECT_EQ(held_up(taken.staging.pending), 1) << "of the stream that widened";
    ASSERT_EQ(channel_->returned.size(), 1U);
    EXPECT_EQ(held_up(channel_->returned[0].pending), 2) << "of the writer and of the reader";
    gate.open();
    EXPECT_TRUE(torch::equal(read(taken, 0), full(1.5F)));
  }
  buckets_->put_main(0, half, false);
  Gate gate(device_.stream(2));
  channel_->users = {device_.stream(2).record()};
  const Contribution taken = buckets_->take_main(0, kF);
  EXPECT_TRUE(is_held_up(device_.stream(1)));
  gate.open();
  EXPECT_TRUE(torch::equal(read(taken, 0), full(1.5F)));
}

TEST_F(GradientStreams, LateIsAddedToWhatMainHas) {
  make(1, kF);
  const at::Tensor one = full(1.0F);
  const at::Tensor two = full(2.0F);
  Gate gate(device_.stream(0));
  buckets_->put_main(0, one, true);
  device_.use(1);
  buckets_->put_late(0, two);
  EXPECT_FALSE(is_held_up(device_.stream(1)));
  buckets_->add_late_to_main(0);
  EXPECT_TRUE(is_held_up(device_.stream(1)));
  ASSERT_EQ(channel_->returned.size(), 1U);
  EXPECT_EQ(held_up(channel_->returned[0].pending), 1) << "late's memory is read";
  const Contribution taken = buckets_->take_main(0, kF);
  EXPECT_EQ(held_up(taken.staging.pending), 2) << "main was written by both";
  gate.open();
  EXPECT_TRUE(torch::equal(read(taken, 0), full(3.0F)));
}

TEST_F(GradientStreams, LateIsAddedOnceItIsThere) {
  make(1, kF);
  const at::Tensor one = full(1.0F);
  const at::Tensor two = full(2.0F);
  Gate gate(device_.stream(0));
  buckets_->put_late(0, two);
  device_.use(1);
  buckets_->put_main(0, one, true);
  EXPECT_FALSE(is_held_up(device_.stream(1)));
  buckets_->add_late_to_main(0);
  EXPECT_TRUE(is_held_up(device_.stream(1)));
  gate.open();
  EXPECT_TRUE(torch::equal(read(buckets_->take_main(0, kF), 0), full(3.0F)));
}

}  // namespace
}  // namespace tandem::zero
