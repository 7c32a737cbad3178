// What is the staged channel's own: the host's memory between ranks that share a device. What all
// channels over devices do is in device_channel_test.cpp.
#include "comm/shared_channel.h"
#include "tests/comm/device_rig.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

namespace tandem::comm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const ChannelSpec kSpec{.name = "critic",
                        .parameter_bytes = 64 * 1024,
                        .largest_staging = 64 * 1024,
                        .staging_slots = 8,
                        .posts_in_flight = 8};

/// The host's plane, which takes its time before it copies what a gather brings.
class LateChannel final : public Channel {
 public:
  LateChannel(std::unique_ptr<Channel> channel, int rank)
      : channel_(std::move(channel)), pause_(rank, 3000) {}

  [[nodiscard]] Group group() const override { return channel_->group(); }
  Staging acquire(std::size_t bytes) override { return channel_->acquire(bytes); }
  void give_back(Staging staging) override { channel_->give_back(std::move(staging)); }
  PostId post(Staging staging, Dtype wire, const PartOfRank& part) override {
    return channel_->post(std::move(staging), wire, part);
  }
  void fold(PostId post,
            std::int64_t begin,
            std::int64_t numel,
            float* acc,
            Accumulator state,
            const std::string& what,
            Deadline deadline) override {
    channel_->fold(post, begin, numel, acc, state, what, deadline);
  }
  [[nodiscard]] bool folded_by_all() const override { return channel_->folded_by_all(); }
  void wait_folded_by_all(const std::string& what, Deadline deadline) override {
    channel_->wait_folded_by_all(what, deadline);
  }
  void trim(int idle_generations) override { channel_->trim(idle_generations); }
  [[nodiscard]] std::shared_ptr<std::byte> parameters() override { return channel_->parameters(); }
  std::uint64_t post_gather(const kernels::Marks& written) override {
    return channel_->post_gather(written);
  }
  void gather(std::uint64_t gather,
              const std::function<ByteRange(int rank)>& of_rank,
              const std::string& what,
              Deadline deadline) override {
    pause_();
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
  const std::unique_ptr<Channel> channel_;
  Pauses pause_;
};

class LatePlane final : public DataPlane {
 public:
  LatePlane(DataPlane& plane, int rank) : plane_(plane), rank_(rank) {}
  std::unique_ptr<Channel> open(const ChannelSpec& spec, Deadline deadline) override {
    return std::make_unique<LateChannel>(plane_.open(spec, deadline), rank_);
  }
  void check() override { plane_.check(); }
  void abort() noexcept override { plane_.abort(); }

 private:
  DataPlane& plane_;
  const int rank_;
};

// Y1: the host's two staging slots are written again and again, by ranks of different pace.
TEST(StagedChannel, KeepsItsBitsForEveryDivisionIntoNodes) {
  for (const int size : {2, 3, 4}) {
    for (const RankShape& shape : node_shapes(size)) {
      SCOPED_TRACE(describe(size, shape));
      const auto body = [&](DeviceRank& on) {
        const auto channel = on.plane.open(kSpec, patient());
        Reducer reducer(on, *channel);
        Pauses pause(on.rank, 500);
        const Bucket bucket{16384, Dtype::kFloat32, dealt(16384, size)};
        constexpr std::uint64_t kPosts = 25;
        for (std::uint64_t number = 0; number < kPosts; ++number) {
          reducer.fold(bucket, reducer.post(bucket, number), 0.0F);
          pause();
        }
        on.finish(on.stream);
        std::uint64_t number = 0;
        for (const std::vector<float>& sum : reducer.sums()) {
          EXPECT_TRUE(same_bits(sum, expected_sum(bucket, number, on.rank, size, 0.0F)))
              << "post " << number;
          ++number;
        }
      };
      on_device_ranks(Way::kStaged, size, body, {.shape = shape});
    }
  }
}

// Y2: every gather is of the same bytes, and ranks take them late.
TEST(StagedChannel, MirrorsParametersForOneGatherAfterAnother) {
  for (const int size : {2, 3}) {
    for (const RankShape& shape : node_shapes(size)) {
      SCOPED_TRACE(describe(size, shape));
      const auto body = [&](DeviceRank& on) {
        LatePlane late(on.host, on.rank);
        const auto plane =
            make_staged_data_plane({on.rendezvous, on.control, on.device, on.stream}, late);
        const auto channel = plane->open(kSpec, patient());
        const auto parameters = channel->parameters();
        constexpr std::size_t kPart = 16 * 1024;
        const auto part = [](int rank) {
          const auto begin = static_cast<std::size_t>(rank) * kPart;
          return ByteRange{begin, begin + kPart};
        };
        constexpr int kGathers = 25;
        std::list<std::vector<std::byte>> patterns;
        std::vector<std::vector<std::byte>> gathered;
        for (int number = 0; number < kGathers; ++number) {
          // On the plane's stream, so in order with the gathers and without the host.
          patterns.emplace_back(kPart, static_cast<std::byte>(number * 4 + on.rank));
          on.device.copy(on.stream, parameters.get() + part(on.rank).begin, patterns.back().data(),
                         kPart);
          channel->gather(channel->post_gather({}), part, "parameters", patient());
          gathered.emplace_back(kSpec.parameter_bytes);
          on.device.copy(on.stream, gathered.back().data(), parameters.get(),
                         kSpec.parameter_bytes);
        }
        on.finish(on.stream);
        for (int number = 0; number < kGathers; ++number) {
          for (int rank = 0; rank < size; ++rank) {
            for (std::size_t i = part(rank).begin; i < part(rank).end; ++i) {
              ASSERT_EQ(gathered[static_cast<std::size_t>(number)][i],
                        static_cast<std::byte>(number * 4 + rank))
                  << "gather " << number;
            }
          }
        }
      };
      on_device_ranks(Way::kStaged, size, body, {.shape = shape});
    }
  }
}

TEST(StagedChannel, TakesNoMoreThanTwoPostsOfTheHostsMemory) {
  on_device_ranks(Way::kStaged, 2, [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    Reducer reducer(on, *channel);
    const Bucket bucket{16384, Dtype::kFloat32, dealt(16384, 2)};  // 64 KiB
    std::vector<PostId> posts;
    for (std::uint64_t number = 0; number < 6; ++number) {
      posts.push_back(reducer.post(bucket, number));
    }
    const std::size_t on_device = channel->staging_bytes();
    EXPECT_EQ(on_device, 6U * 64 * 1024);
    for (const PostId post : posts) reducer.fold(bucket, post, 0.0F);
    on.finish(on.stream);
    EXPECT_GT(channel->staging_bytes(), on_device);
    EXPECT_LE(channel->staging_bytes(), on_device + 2U * 64 * 1024);
    on.rendezvous.all_gather("both have folded", "", patient());
    channel->trim(0);
    EXPECT_EQ(channel->staging_bytes(), 0U);
  });
}

TEST(StagedChannel, AMissingRankIsATimeoutThatNamesIt) {
  on_device_ranks(Way::kStaged, 3, [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    if (on.rank == 1) {
      on.rendezvous.all_gather("the others have waited", "", patient());
      return;
    }
    const PostId post = channel->post({}, Dtype::kFloat32, everything(100));
    std::vector<float> sum(100);
    try {
      channel->fold(post, 0, 100, sum.data(), Accumulator::kFresh, "bucket 3", soon());
      ADD_FAILURE() << "folded without rank 1";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("'critic'"), HasSubstr("bucket 3"), HasSubstr("missing rank 1")));
    }
    on.rendezvous.all_gather("the others have waited", "", patient());
  });
}

TEST(StagedChannel, WorkThatNeverEndsIsATimeoutAndAnAbortIsSeen) {
  on_device_ranks(Way::kStaged, 2, [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    std::atomic<bool> end{false};
    // The writer of the gradients hangs.
    Staging staging = channel->acquire(400);
    kernels::give_simulated_work(on.user, [&] {
      while (!end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    staging.pending = {on.user.record()};
    const PostId post = channel->post(staging, Dtype::kFloat32, everything(100));
    std::vector<float> sum(100);
    const auto fold = [&](Deadline deadline) {
      channel->fold(post, 0, 100, sum.data(), Accumulator::kFresh, "bucket 3", deadline);
    };
    if (on.rank == 0) {
      try {
        fold(soon());
        ADD_FAILURE() << "the copy to the host has not been made";
      } catch (const Timeout& error) {
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("'critic'"), HasSubstr("bucket 3"), HasSubstr("rank 0 of 2")));
        on.control.abort(error.what());
      }
    } else {
      EXPECT_THROW(fold(patient()), WorldBroken);
    }
    end = true;
    on.abort();
  });
}

TEST(SharedChannel, GivesItsSlicesToTheFolderOfTheSpec) {
  on_all_node_shapes(3, [](Rendezvous& rendezvous) {
    constexpr std::int64_t kNumel = 600'000;  // with messages, in pieces of 256 Ki elements
    const auto control = make_control_plane(rendezvous, patient());
    const auto plane = make_data_plane(rendezvous, *control);
    std::vector<float> sums(kNumel, -1.0F);
    std::vector<float> never_touched(kNumel, -1.0F);
    ChannelSpec spec{.name = "critic",
                     .parameter_bytes = 0,
                     .largest_staging = kNumel * sizeof(float),
                     .staging_slots = 1,
                     .posts_in_flight = 1};
    std::int64_t next = 0;
    spec.folder = [&](std::span<const kernels::Slice> slices, std::int64_t numel, float* acc,
                      Accumulator state) {
      EXPECT_EQ(acc - never_touched.data(), next) << "one stretch after another";
      EXPECT_EQ(slices.size(), 3U);
      kernels::fold(slices, numel, sums.data() + next, state);
      next += numel;
    };
    const auto channel = plane->open(spec, patient());
    const Staging staging = channel->acquire(kNumel * sizeof(float));
    auto* const values = reinterpret_cast<float*>(staging.data);
    for (std::int64_t i = 0; i < kNumel; ++i) {
      values[i] = static_cast<float>(i + rendezvous.group().rank);
    }
    channel->fold(channel->post(staging, Dtype::kFloat32, everything(kNumel)), 0, kNumel,
                  never_touched.data(), Accumulator::kFresh, "bucket", patient());
    EXPECT_EQ(next, kNumel);
    EXPECT_EQ(never_touched, std::vector<float>(kNumel, -1.0F));
    // (i) + (i + 1) + (i + 2), exact below 2^24.
    for (std::int64_t i = 0; i < kNumel; i += 1111) {
      ASSERT_EQ(sums[static_cast<std::size_t>(i)], static_cast<float>(3 * i + 3));
    }
    channel->wait_folded_by_all("the end", patient());
  });
}

}  // namespace
}  // namespace tandem::comm
