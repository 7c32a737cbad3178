#include "tests/support/strict_plane.h"

#include "kernels/simulated_device.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <utility>

namespace tandem::test_support {
namespace {

using comm::Deadline;

/// What the channels of a plane share.
struct Shared {
  kernels::Stream& stream;
  std::unique_ptr<kernels::Stream> former;  // of those who used the memory before
  OnPlaneCall on_call;
};

class StrictChannel final : public comm::Channel {
 public:
  StrictChannel(std::unique_ptr<comm::Channel> channel, std::shared_ptr<Shared> shared)
      : shared_(std::move(shared)), channel_(std::move(channel)) {}
  // The pool does not know of the former users.
  ~StrictChannel() override {
    const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    EXPECT_TRUE(shared_->former->record().wait_until(until));
  }
  StrictChannel(const StrictChannel&) = delete;
  StrictChannel& operator=(const StrictChannel&) = delete;
  StrictChannel(StrictChannel&&) = delete;
  StrictChannel& operator=(StrictChannel&&) = delete;

  [[nodiscard]] comm::Group group() const override { return channel_->group(); }

  comm::Staging acquire(std::size_t bytes) override {
    comm::Staging staging = channel_->acquire(bytes);
    shared_->on_call(PlaneCall::kAcquire, *shared_->former);
    shared_->former->wait(staging.pending);
    kernels::give_simulated_work(*shared_->former,
                                 [to = staging.data, bytes] { std::memset(to, 0xFF, bytes); });
    staging.pending.push_back(shared_->former->record());
    return staging;
  }
  void give_back(comm::Staging staging) override { channel_->give_back(std::move(staging)); }
  comm::PostId post(comm::Staging staging,
                    kernels::Dtype wire,
                    const comm::PartOfRank& part) override {
    EXPECT_FALSE(staging && staging.pending.empty()) << "staging that nobody is said to write";
    const comm::PostId post = channel_->post(std::move(staging), wire, part);
    shared_->on_call(PlaneCall::kPost, shared_->stream);
    return post;
  }
  void fold(comm::PostId post,
            std::int64_t begin,
            std::int64_t numel,
            float* acc,
            kernels::Accumulator state,
            const std::string& what,
            Deadline deadline) override {
    channel_->fold(post, begin, numel, acc, state, what, deadline);
    shared_->on_call(PlaneCall::kFold, shared_->stream);
  }
  [[nodiscard]] bool folded_by_all() const override { return channel_->folded_by_all(); }
  void wait_folded_by_all(const std::string& what, Deadline deadline) override {
    channel_->wait_folded_by_all(what, deadline);
  }
  void trim(int idle_generations) override { channel_->trim(idle_generations); }

  [[nodiscard]] std::shared_ptr<std::byte> parameters() override { return channel_->parameters(); }
  std::uint64_t post_gather(const kernels::Marks& written) override {
    EXPECT_FALSE(written.empty()) << "parameters that nobody is said to write";
    return channel_->post_gather(written);
  }
  void gather(std::uint64_t gather,
              const std::function<comm::ByteRange(int rank)>& of_rank,
              const std::string& what,
              Deadline deadline) override {
    channel_->gather(gather, of_rank, what, deadline);
  }
  void wait_gathered_by_all(const std::string& what, Deadline deadline) override {
    channel_->wait_gathered_by_all(what, deadline);
  }

  [[nodiscard]] std::size_t staging_bytes() const override { return channel_->staging_bytes(); }
  [[nodiscard]] std::uint64_t reduced_bytes() const override { return channel_->reduced_bytes(); }
  [[nodiscard]] std::uint64_t gathered_bytes() const override { return channel_->gathered_bytes(); }
  [[nodiscard]] std::uint64_t between_nodes_bytes() const override {
    return channel_->between_nodes_bytes();
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const std::unique_ptr<comm::Channel> channel_;
};

class StrictPlane final : public comm::DataPlane {
 public:
  StrictPlane(std::unique_ptr<comm::DataPlane> plane, std::shared_ptr<Shared> shared)
      : shared_(std::move(shared)), plane_(std::move(plane)) {}

  std::unique_ptr<comm::Channel> open(const comm::ChannelSpec& spec, Deadline deadline) override {
    return std::make_unique<StrictChannel>(plane_->open(spec, deadline), shared_);
  }
  void check() override { plane_->check(); }
  void abort() noexcept override { plane_->abort(); }

 private:
  const std::shared_ptr<Shared> shared_;
  const std::unique_ptr<comm::DataPlane> plane_;
};

}  // namespace

std::unique_ptr<comm::DataPlane> make_strict_plane(std::unique_ptr<comm::DataPlane> plane,
                                                   kernels::Device& device,
                                                   kernels::Stream& stream,
                                                   OnPlaneCall on_call) {
  return std::make_unique<StrictPlane>(
      std::move(plane),
      std::make_shared<Shared>(
          Shared{stream, device.make_stream(kernels::Priority::kNormal), std::move(on_call)}));
}

}  // namespace tandem::test_support
