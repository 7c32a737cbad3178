// What channels over device memory do whichever way ranks reach each other. Work is late on every
// stream, so a wait that is missing shows as wrong bits.
#include "comm/device_channel.h"

#include "tests/comm/device_rig.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <thread>

namespace tandem::comm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const ChannelSpec kSpec{.name = "critic",
                        .parameter_bytes = 64 * 1024,
                        .largest_staging = 64 * 1024,
                        .staging_slots = 8,
                        .posts_in_flight = 8};

class DeviceChannels : public testing::TestWithParam<Way> {};

INSTANTIATE_TEST_SUITE_P(Ways,
                         DeviceChannels,
                         testing::Values(Way::kNccl, Way::kStaged),
                         [](const auto& way) { return name_of(way.param); });

TEST_P(DeviceChannels, GiveTheBitsOfTheSharedMemoryChannel) {
  for (int size = 1; size <= 4; ++size) {
    for (const Dtype wire : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
      SCOPED_TRACE(std::string(kernels::name_of(wire)) + ", ranks " + std::to_string(size));
      on_device_ranks(GetParam(), size, [&](DeviceRank& on) {
        const auto channel = on.plane.open(kSpec, patient());
        const auto on_host = on.host.open(kSpec, patient());
        Reducer reducer(on, *channel);
        std::vector<std::vector<float>> expected;
        // 9,000 elements: uneven slices, the last rank of four has the rest of a block. 1,000: all
        // of it on rank 0. Everything on every rank: more than one piece.
        const Bucket buckets[] = {{9000, wire, dealt(9000, size)},
                                  {1000, wire, dealt(1000, size)},
                                  {16384, wire, everything(16384)}};
        for (std::uint64_t number = 0; number < std::size(buckets); ++number) {
          const Bucket& bucket = buckets[number];
          reducer.fold(bucket, reducer.post(bucket, number), 0.125F);

          const auto values = contribution(on.rank, number, bucket.numel, wire);
          const Staging staging = on_host->acquire(values.size());
          std::memcpy(staging.data, values.data(), values.size());
          const ElementRange part = bucket.part(on.rank);
          auto& sum =
              expected.emplace_back(static_cast<std::size_t>(part.end - part.begin), 0.125F);
          on_host->fold(on_host->post(staging, wire, bucket.part), part.begin,
                        part.end - part.begin, sum.data(), Accumulator::kContinue, "bucket",
                        patient());
        }
        on.finish(on.stream);
        std::size_t number = 0;
        for (const std::vector<float>& sum : reducer.sums()) {
          EXPECT_TRUE(same_bits(sum, expected[number])) << "post " << number;
          EXPECT_TRUE(same_bits(sum, expected_sum(buckets[number], number, on.rank, size, 0.125F)));
          ++number;
        }
        EXPECT_EQ(channel->reduced_bytes(), on_host->reduced_bytes());
        EXPECT_EQ(channel->between_nodes_bytes(), 0U);
      });
    }
  }
}

TEST_P(DeviceChannels, RanksWithoutAContributionCountAsZeros) {
  for (int size = 1; size <= 3; ++size) {
    on_device_ranks(GetParam(), size, [&](DeviceRank& on) {
      const auto channel = on.plane.open(kSpec, patient());
      Reducer reducer(on, *channel);
      std::vector<Bucket> buckets;
      for (int absent = 0; absent < 1 << size; ++absent) {
        Bucket bucket{5000, absent % 2 == 0 ? Dtype::kBFloat16 : Dtype::kFloat32,
                      dealt(5000, size)};
        for (int rank = 0; rank < size; ++rank) bucket.zeros.push_back((absent >> rank & 1) == 1);
        buckets.push_back(bucket);
      }
      for (std::size_t number = 0; number < buckets.size(); ++number) {
        reducer.fold(buckets[number], reducer.post(buckets[number], number), 0.5F);
      }
      on.finish(on.stream);
      std::size_t number = 0;
      for (const std::vector<float>& sum : reducer.sums()) {
        EXPECT_TRUE(same_bits(sum, expected_sum(buckets[number], number, on.rank, size, 0.5F)))
            << "ranks without: " << number;
        ++number;
      }
      // A fresh sum of nothing is zero.
      std::vector<float> sum(100, 7.0F);
      const PostId nothing = channel->post({}, Dtype::kFloat32, everything(100));
      channel->fold(nothing, 0, 100, sum.data(), Accumulator::kFresh, "bucket", patient());
      on.finish(on.stream);
      EXPECT_EQ(sum, std::vector<float>(100, 0.0F));
    });
  }
}

// As in an engine: one thread posts and waits for folds, another one folds and gathers in the
// agreed order, and every stream and every rank is late at some time.
TEST_P(DeviceChannels, ManyPostsAndGathersInFlightKeepTheirBits) {
  constexpr std::uint64_t kPosts = 60;
  for (const int size : {1, 2, 3}) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", ranks " + std::to_string(size));
      const auto body = [&](DeviceRank& on) {
        const auto channel = on.plane.open(kSpec, patient());
        const auto parameters = channel->parameters();
        Reducer reducer(on, *channel);
        const auto bucket_of = [&](std::uint64_t number) {
          const std::int64_t numel = number % 3 == 0 ? 16000 : 6000;
          Bucket bucket{
              numel, number % 4 == 1 ? Dtype::kFloat32 : Dtype::kBFloat16, dealt(numel, size), {}};
          for (int rank = 0; rank < size; ++rank) {
            bucket.zeros.push_back((number + static_cast<std::uint64_t>(rank)) % 5 == 4);
          }
          return bucket;
        };
        const auto value_of = [](std::uint64_t number, int rank) {
          return static_cast<std::byte>(number * 3 + static_cast<std::uint64_t>(rank));
        };
        const auto part = [&](int rank) {
          const std::size_t each = kSpec.parameter_bytes / 4;
          const auto begin = static_cast<std::size_t>(rank) * each;
          return ByteRange{begin, begin + each};
        };
        // Every third post is followed by a gather, whose outcome is copied away for the end.
        kernels::Queue queue("fold");
        std::vector<std::vector<std::byte>> gathered(kPosts);
        std::list<std::vector<std::byte>> patterns;
        kernels::Event gather_given;
        kernels::Mark copied;  // of the jobs up to that event
        Pauses pause(on.rank, 300);
        for (std::uint64_t number = 0; number < kPosts; ++number) {
          if (number % 6 == 0) channel->wait_folded_by_all("six posts", patient());
          pause();
          const Bucket bucket = bucket_of(number);
          const PostId post = reducer.post(bucket, number);
          queue.enqueue([&, bucket, post] { reducer.fold(bucket, post, 0.25F); });
          channel->trim(3);
          if (number % 3 != 0) continue;

          ASSERT_TRUE(gather_given.wait_until(patient().at));
          on.user.wait(copied);
          const ByteRange mine = part(on.rank);
          patterns.emplace_back(mine.end - mine.begin, value_of(number, on.rank));
          on.device.copy(on.user, parameters.get() + mine.begin, patterns.back().data(),
                         patterns.back().size());
          const std::uint64_t gather = channel->post_gather({on.user.record()});
          gathered[number].resize(kSpec.parameter_bytes);
          queue.enqueue([&, gather, number] {
            channel->gather(gather, part, "parameters", patient());
            on.device.copy(on.stream, gathered[number].data(), parameters.get(),
                           kSpec.parameter_bytes);
            copied = on.stream.record();
          });
          gather_given = queue.record();
        }
        ASSERT_TRUE(queue.record().wait_until(patient().at));
        EXPECT_TRUE(channel->folded_by_all());
        on.finish(on.stream);
        std::uint64_t number = 0;
        for (const std::vector<float>& sum : reducer.sums()) {
          ASSERT_TRUE(same_bits(sum, expected_sum(bucket_of(number), number, on.rank, size, 0.25F)))
              << "post " << number;
          for (int rank = 0; rank < size && !gathered[number].empty(); ++rank) {
            for (std::size_t i = part(rank).begin; i < part(rank).end; ++i) {
              ASSERT_EQ(gathered[number][i], value_of(number, rank)) << "gather " << number;
            }
          }
          ++number;
        }
        EXPECT_EQ(number, kPosts);
      };
      on_device_ranks(GetParam(), size, body, {.shape = {}, .max_us = 400, .seed = seed});
    }
  }
}

TEST_P(DeviceChannels, GatherWhateverPartsRanksHave) {
  for (int size = 1; size <= 4; ++size) {
    on_device_ranks(GetParam(), size, [&](DeviceRank& on) {
      const auto channel = on.plane.open(kSpec, patient());
      const auto parameters = channel->parameters();
      using Part = std::function<ByteRange(int)>;
      const std::pair<const char*, Part> parts[] = {
          {"equal, in a row",
           [](int rank) {
             const auto begin = 256 + static_cast<std::size_t>(rank) * 4096;
             return ByteRange{begin, begin + 4096};
           }},
          {"uneven, the last one empty",
           [size](int rank) {
             const auto begin = static_cast<std::size_t>(rank) * 10000;
             const bool empty = rank > 0 && rank == size - 1;
             return ByteRange{begin, empty ? begin : begin + 1000 * (rank + 1)};
           }},
          {"equal, not in a row",
           [size](int rank) {
             const auto begin = static_cast<std::size_t>(size - 1 - rank) * 4096;
             return ByteRange{begin, begin + 4096};
           }},
          {"one root",
           [size](int rank) {
             return rank == size - 1 ? ByteRange{0, kSpec.parameter_bytes} : ByteRange{};
           }},
          {"nothing", [](int /*rank*/) { return ByteRange{}; }}};
      int value = 1;
      std::uint64_t from_peers = 0;
      for (const auto& [name, part] : parts) {
        SCOPED_TRACE(std::string(name) + ", ranks " + std::to_string(size));
        const ByteRange mine = part(on.rank);
        const std::vector<std::byte> pattern(mine.end - mine.begin,
                                             static_cast<std::byte>(value + on.rank));
        on.device.copy(on.user, parameters.get() + mine.begin, pattern.data(), pattern.size());
        channel->gather(channel->post_gather({on.user.record()}), part, "parameters", patient());
        on.finish(on.stream);
        for (int rank = 0; rank < size; ++rank) {
          for (std::size_t i = part(rank).begin; i < part(rank).end; ++i) {
            ASSERT_EQ(parameters.get()[i], static_cast<std::byte>(value + rank)) << i;
          }
          if (rank != on.rank) from_peers += part(rank).end - part(rank).begin;
        }
        EXPECT_EQ(channel->gathered_bytes(), from_peers);
        value += 10;
      }
      EXPECT_THROW(channel->gather(
                       channel->post_gather({}),
                       [](int /*rank*/) {
                         return ByteRange{0, kSpec.parameter_bytes + 1};
                       },
                       "x", patient()),
                   InvalidArgument);
    });
  }
}

TEST_P(DeviceChannels, WhatIsGivenBackUnwrittenIsStillWaitedFor) {
  ChannelSpec spec = kSpec;
  spec.staging_slots = 1;
  on_device_ranks(GetParam(), 1,
                  [&](DeviceRank& on) {
                    const auto channel = on.plane.open(spec, patient());
                    Reducer reducer(on, *channel);
                    const Bucket bucket{8192, Dtype::kFloat32, everything(8192)};
                    for (std::uint64_t number = 0; number < 10; ++number) {
                      Staging unused = channel->acquire(100);
                      unused.pending = {};
                      channel->give_back(unused);
                      EXPECT_THROW(channel->give_back(unused), InvalidArgument) << "twice";
                      reducer.fold(bucket, reducer.post(bucket, number), 0.0F);
                    }
                    on.finish(on.stream);
                    std::uint64_t number = 0;
                    for (const std::vector<float>& sum : reducer.sums()) {
                      EXPECT_TRUE(same_bits(sum, expected_sum(bucket, number, 0, 1, 0.0F)))
                          << number;
                      ++number;
                    }
                  },
                  {.shape = {}, .max_us = 3000, .seed = 1});
}

TEST_P(DeviceChannels, StagingIsRefusedBeyondTheSpecAndFreedWhenIdle) {
  on_device_ranks(GetParam(), 1, [](DeviceRank& on) {
    ChannelSpec spec = kSpec;
    spec.staging_slots = 2;
    const auto channel = on.plane.open(spec, patient());
    const std::size_t before = on.device.allocated();
    const Staging one = channel->acquire(1000);
    const Staging two = channel->acquire(spec.largest_staging);
    EXPECT_NE(one.data, two.data);
    EXPECT_EQ(channel->staging_bytes(), 1000 + spec.largest_staging);
    EXPECT_THROW(channel->acquire(1), InvalidArgument);
    channel->give_back(one);
    EXPECT_THROW(channel->acquire(spec.largest_staging + 1), InvalidArgument);
    EXPECT_EQ(channel->acquire(500).data, one.data);
    channel->give_back(two);
    channel->trim(2);
    EXPECT_EQ(channel->staging_bytes(), 1000 + spec.largest_staging);
    channel->trim(2);
    EXPECT_EQ(channel->staging_bytes(), 1000U) << "the other one is held";
    EXPECT_EQ(on.device.allocated(), before + 1000);
  });
}

TEST_P(DeviceChannels, RefuseWhatIsOutOfOrderOrOutOfRange) {
  on_device_ranks(GetParam(), 1, [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    const auto fold = [&](PostId post, std::int64_t begin, std::int64_t numel) {
      std::vector<float> sum(1000);
      channel->fold(post, begin, numel, sum.data(), Accumulator::kFresh, "bucket", patient());
      on.finish(on.stream);
    };
    EXPECT_THROW(fold(0, 0, 10), InvalidArgument) << "never posted";
    channel->post({}, Dtype::kFloat32, everything(10));
    EXPECT_THROW(fold(1, 0, 10), InvalidArgument) << "out of order";
    EXPECT_THROW(fold(0, 0, 11), Mismatch);
    EXPECT_THROW(fold(0, 1, 10), Mismatch);
    fold(0, 0, 10);
    EXPECT_THROW(channel->post(channel->acquire(40), Dtype::kFloat32, everything(11)),
                 InvalidArgument);
    const auto nowhere = [](int /*rank*/) { return ByteRange{}; };
    EXPECT_THROW(channel->gather(0, nowhere, "x", patient()), InvalidArgument);
    ChannelSpec spec = kSpec;
    spec.share_parameters = true;
    try {
      on.plane.open(spec, patient());
      ADD_FAILURE() << "parameters of a device cannot be shared";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'critic'"), HasSubstr("share_parameters")));
    }
  });
}

TEST_P(DeviceChannels, WaitForWhatHasNotBeenGivenToTheStreamUntilTheirDeadline) {
  on_device_ranks(GetParam(), 2, [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    channel->post({}, Dtype::kFloat32, everything(10));
    channel->post_gather({});
    EXPECT_FALSE(channel->folded_by_all());
    try {
      channel->wait_folded_by_all("folds of the last pass", soon());
      ADD_FAILURE() << "nobody folds";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'critic'"), HasSubstr("folds of the last pass"),
                                      HasSubstr("rank " + std::to_string(on.rank))));
    }
    EXPECT_THROW(channel->wait_gathered_by_all("x", soon()), Timeout);
    on.rendezvous.all_gather("both have waited", "", patient());
    if (on.rank == 1) on.control.abort("rank 1 failed");
    EXPECT_THROW(channel->wait_folded_by_all("x", patient()), WorldBroken);
    EXPECT_THROW(on.plane.check(), WorldBroken);
    EXPECT_THROW(channel->fold(0, 0, 10, nullptr, Accumulator::kFresh, "x", patient()),
                 WorldBroken);
  });
}

TEST_P(DeviceChannels, AfterAnAbortNothingIsServed) {
  on_device_ranks(GetParam(), 2, [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    channel->post({}, Dtype::kFloat32, everything(10));
    channel->post_gather({});
    on.plane.abort();
    on.plane.abort();
    const auto nowhere = [](int /*rank*/) { return ByteRange{}; };
    EXPECT_THROW(on.plane.check(), WorldBroken);
    EXPECT_THROW(channel->fold(0, 0, 10, nullptr, Accumulator::kFresh, "x", patient()),
                 WorldBroken);
    EXPECT_THROW(channel->gather(0, nowhere, "x", patient()), WorldBroken);
    EXPECT_THROW(channel->wait_folded_by_all("x", patient()), WorldBroken);
  });
}

TEST_P(DeviceChannels, MemoryThatIsMissingOnOneRankIsTheSameErrorOnAll) {
  std::vector<std::string> texts(3);
  on_device_ranks(GetParam(), 3, [&](DeviceRank& on) {
    if (on.rank == 1) on.device.set_limit(100'000);  // 64 KiB of parameters, and two slices
    try {
      on.plane.open(kSpec, patient());
      ADD_FAILURE() << "opened without memory";
    } catch (const OutOfMemory& error) {
      texts[static_cast<std::size_t>(on.rank)] = error.what();
    }
    on.device.set_limit(std::numeric_limits<std::size_t>::max());
    const auto channel = on.plane.open(kSpec, patient());
    on.device.set_limit(on.device.allocated());
    EXPECT_THROW(channel->acquire(100), OutOfMemory);
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("rank 1"), HasSubstr("'critic'"), HasSubstr("bucket_bytes"),
                              HasSubstr("watched")));
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST_P(DeviceChannels, MayGoWhileTheirWorkIsUnderWay) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const auto body = [&](DeviceRank& on) {
      auto channel = on.plane.open(kSpec, patient());
      auto parameters = channel->parameters();
      Reducer reducer(on, *channel);
      const Bucket bucket{16000, Dtype::kFloat32, dealt(16000, 2)};
      for (std::uint64_t number = 0; number < 3; ++number) {
        reducer.fold(bucket, reducer.post(bucket, number), 1.0F);
      }
      const auto part = [](int rank) {
        const auto begin = static_cast<std::size_t>(rank) * 1024;
        return ByteRange{begin, begin + 1024};
      };
      const std::vector<std::byte> pattern(1024, static_cast<std::byte>(on.rank + 5));
      on.device.copy(on.user, parameters.get() + part(on.rank).begin, pattern.data(), 1024);
      channel->gather(channel->post_gather({on.user.record()}), part, "parameters", patient());
      std::vector<std::byte> gathered(2048);
      on.device.copy(on.stream, gathered.data(), parameters.get(), gathered.size());
      // The tensors first, then the engine; a larger one comes and replaces what all share.
      parameters.reset();
      channel.reset();
      ChannelSpec larger = kSpec;
      larger.largest_staging *= 4;
      const auto next = on.plane.open(larger, patient());
      on.finish(on.stream);
      std::uint64_t number = 0;
      for (const std::vector<float>& sum : reducer.sums()) {
        EXPECT_TRUE(same_bits(sum, expected_sum(bucket, number, on.rank, 2, 1.0F)))
            << "post " << number << ", seed " << seed;
        ++number;
      }
      for (std::size_t i = 0; i < gathered.size(); ++i) {
        ASSERT_EQ(gathered[i], static_cast<std::byte>(i / 1024 + 5)) << "seed " << seed;
      }
      // What nobody uses any more is freed: the old channel's staging among it.
      next->trim(0);
      const std::size_t slots = on.device.allocated();
      EXPECT_LT(slots, kSpec.parameter_bytes + 2 * larger.largest_staging);
    };
    on_device_ranks(GetParam(), 2, body, {.shape = {}, .max_us = 3000, .seed = seed});
  }
}

TEST_P(DeviceChannels, CountWhatComesFromOtherNodes) {
  const auto body = [](DeviceRank& on) {
    const auto channel = on.plane.open(kSpec, patient());
    Reducer reducer(on, *channel);
    const Bucket bucket{3072, Dtype::kBFloat16, dealt(3072, 3)};  // 1,024 elements each
    for (std::uint64_t number = 0; number < 4; ++number) {
      reducer.fold(bucket, reducer.post(bucket, number), 0.0F);
    }
    const auto part = [](int rank) {
      const auto begin = static_cast<std::size_t>(rank) * 1000;
      return ByteRange{begin, begin + 1000};
    };
    channel->gather(channel->post_gather({}), part, "parameters", patient());
    on.finish(on.stream);
    std::uint64_t number = 0;
    for (const std::vector<float>& sum : reducer.sums()) {
      EXPECT_TRUE(same_bits(sum, expected_sum(bucket, number, on.rank, 3, 0.0F)));
      ++number;
    }
    EXPECT_EQ(channel->reduced_bytes(), 4U * 2 * 2048);
    EXPECT_EQ(channel->gathered_bytes(), 2000U);
    // Ranks 0 and 1 share a node.
    const std::uint64_t far = on.rank == 2 ? 2 : 1;
    EXPECT_EQ(channel->between_nodes_bytes(), far * (4 * 2048 + 1000));
  };
  on_device_ranks(GetParam(), 3, body, {.shape = {ThreadNodes{2, {}, MessageDelays{1, 200}}}});
}

}  // namespace
}  // namespace tandem::comm
