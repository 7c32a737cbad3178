// tests/support/fake_channel.h: one rank's channel in plain memory, strict about staging.
//
// 1. Staging and parameters start as NaN in every type (all bits set), so that what was never
// written
//    shows.
// 2. Fails the test when staging is given back twice, posted without being held, or too large for
// the
//    spec; outstanding() tells leaks.
// 3. A post is folded from the staging itself; the staging returns to the pool afterwards.
#pragma once

#include "comm/data_plane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <new>
#include <set>
#include <utility>
#include <vector>

namespace tandem::test_support {

class FakeChannel : public comm::Channel {
 public:
  explicit FakeChannel(comm::ChannelSpec spec)
      : spec_(std::move(spec)), parameters_(poisoned(spec_.parameter_bytes)) {}

  [[nodiscard]] comm::Group group() const override { return {0, 1}; }

  comm::Staging acquire(std::size_t bytes) override {
    EXPECT_LE(bytes, spec_.largest_staging);
    EXPECT_LT(held_.size() + posts_.size(), spec_.staging_slots) << "more slots than the spec says";
    const std::int32_t slot = next_slot_++;
    std::shared_ptr<std::byte> memory = poisoned(bytes);
    const comm::Staging staging{memory.get(), bytes, slot};
    held_.emplace(slot, std::move(memory));
    return staging;
  }

  void give_back(comm::Staging staging) override {
    EXPECT_EQ(held_.erase(staging.slot), 1U) << "given back without being held";
  }

  comm::PostId post(comm::Staging staging,
                    kernels::Dtype wire,
                    const comm::PartOfRank& /*part*/) override {
    Post post{staging, wire, nullptr};
    if (staging) {
      auto held = held_.extract(staging.slot);
      EXPECT_FALSE(held.empty()) << "posted without being held";
      if (!held.empty()) post.memory = std::move(held.mapped());
    }
    posts_.emplace(next_post_, std::move(post));
    return next_post_++;
  }

  void fold(comm::PostId post,
            std::int64_t begin,
            std::int64_t numel,
            float* acc,
            kernels::Accumulator state,
            const std::string&,
            comm::Deadline) override {
    const auto found = posts_.find(post);
    ASSERT_NE(found, posts_.end()) << "folded without being posted";
    const comm::Staging& staging = found->second.staging;
    kernels::Slice slice;
    slice.dtype = found->second.wire;
    if (staging) {
      slice.data =
          staging.data + static_cast<std::size_t>(begin) * kernels::bytes_of(found->second.wire);
    }
    kernels::fold(std::span(&slice, 1), numel, acc, state);
    posts_.erase(found);
  }

  [[nodiscard]] bool folded_by_all() const override { return posts_.empty(); }
  void wait_folded_by_all(const std::string&, comm::Deadline) override {}
  void trim(int) override {}

  [[nodiscard]] std::shared_ptr<std::byte> parameters() override { return parameters_; }
  std::uint64_t post_gather(const kernels::Marks& /*written*/) override { return gathers_++; }
  void gather(std::uint64_t,
              const std::function<comm::ByteRange(int)>&,
              const std::string&,
              comm::Deadline) override {}
  void wait_gathered_by_all(const std::string&, comm::Deadline) override {}

  [[nodiscard]] std::size_t staging_bytes() const override { return 0; }
  [[nodiscard]] std::uint64_t reduced_bytes() const override { return 0; }
  [[nodiscard]] std::uint64_t gathered_bytes() const override { return 0; }
  [[nodiscard]] std::uint64_t between_nodes_bytes() const override { return 0; }

  /// Staging that was acquired and neither posted nor given back.
  [[nodiscard]] std::size_t outstanding() const { return held_.size(); }
  /// Drops the test's and the channel's own hold on parameter memory.
  void drop_parameters() { parameters_.reset(); }

 private:
  struct Post {
    comm::Staging staging;
    kernels::Dtype wire;
    std::shared_ptr<std::byte> memory;
  };

  static std::shared_ptr<std::byte> poisoned(std::size_t bytes) {
    constexpr std::align_val_t kAlign{64};
    auto* memory = static_cast<std::byte*>(::operator new(bytes, kAlign));
    std::memset(memory, 0xFF, bytes);
    return {memory, [](std::byte* data) { ::operator delete (data, std::align_val_t{64}); }};
  }

  comm::ChannelSpec spec_;
  std::shared_ptr<std::byte> parameters_;
  std::map<std::int32_t, std::shared_ptr<std::byte>> held_;
  std::map<comm::PostId, Post> posts_;
  std::int32_t next_slot_ = 0;
  comm::PostId next_post_ = 0;
  std::uint64_t gathers_ = 0;
};

}  // namespace tandem::test_support
