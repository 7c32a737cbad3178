#include "comm/memory_limit.h"
#include "comm/planes.h"
#include "kernels/bf16.h"
#include "tests/comm/thread_ranks.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <atomic>
#include <cstring>
#include <set>

namespace tandem::comm {
namespace {

using kernels::Accumulator;
using kernels::Dtype;
using testing::AllOf;
using testing::HasSubstr;

const ChannelSpec kSpec{.name = "critic",
                        .parameter_bytes = 64 * 1024,
                        .largest_staging = 64 * 1024,
                        .staging_slots = 4,
                        .posts_in_flight = 4};

struct RankView {
  Rendezvous& rendezvous;
  ControlPlane& control;
  DataPlane& plane;
  Channel& channel;
  int rank;
  int size;
};

/// For every division of the ranks into nodes.
void with_channels(int size, const ChannelSpec& spec, const std::function<void(RankView)>& body) {
  on_all_node_shapes(size, [&](Rendezvous& rendezvous) {
    const auto control = make_control_plane(rendezvous, patient());
    const auto plane = make_data_plane(rendezvous, *control);
    const auto channel = plane->open(spec, patient());
    body(RankView{rendezvous, *control, *plane, *channel, rendezvous.group().rank,
                  rendezvous.group().size});
  });
}

/// A value that the sum's order matters for, different for each rank, post and element.
float value(int rank, std::uint64_t post, std::int64_t i) {
  const auto hash = static_cast<std::uint32_t>(
      (static_cast<std::uint64_t>(rank) * 7919 + post * 104729 + static_cast<std::uint64_t>(i)) *
      2654435761U);
  const float magnitude = static_cast<float>(1U << (hash % 20));
  return (static_cast<float>(hash >> 12) / 524288.0F - 1.0F) * magnitude;
}

PartOfRank all_of(std::int64_t numel) {
  return [numel](int) { return ElementRange{0, numel}; };
}
PartOfRank dealt(std::int64_t numel, int size) {
  return [=](int rank) { return ElementRange{numel * rank / size, numel * (rank + 1) / size}; };
}

PostId post_nothing(RankView view) { return view.channel.post({}, Dtype::kFloat32, all_of(0)); }

PostId post_values(
    RankView view, std::int64_t numel, Dtype wire, std::uint64_t post, const PartOfRank& part) {
  const Staging staging =
      view.channel.acquire(static_cast<std::size_t>(numel) * kernels::bytes_of(wire));
  for (std::int64_t i = 0; i < numel; ++i) {
    if (wire == Dtype::kFloat32) {
      reinterpret_cast<float*>(staging.data)[i] = value(view.rank, post, i);
    } else {
      reinterpret_cast<kernels::Bf16*>(staging.data)[i] =
          kernels::round_half_away(value(view.rank, post, i));
    }
  }
  return view.channel.post(staging, wire, part);
}

float wire_value(int rank, std::uint64_t post, std::int64_t i, Dtype wire) {
  const float exact = value(rank, post, i);
  return wire == Dtype::kFloat32 ? exact : kernels::to_float(kernels::round_half_away(exact));
}

TEST(SharedChannel, AddsTheSlicesInRankOrderBitForBit) {
  constexpr std::int64_t kNumel = 4096;
  for (const Dtype wire : {Dtype::kFloat32, Dtype::kBFloat16}) {
    for (int size = 1; size <= 4; ++size) {
      with_channels(size, kSpec, [&](RankView view) {
        const PostId post = post_values(view, kNumel, wire, 0, dealt(kNumel, size));
        EXPECT_EQ(post, 0U);
        const std::int64_t begin = kNumel * view.rank / size;
        const std::int64_t end = kNumel * (view.rank + 1) / size;
        std::vector<float> acc(static_cast<std::size_t>(end - begin), 0.125F);
        view.channel.fold(post, begin, end - begin, acc.data(), Accumulator::kContinue, "bucket 0",
                          patient());
        for (std::int64_t i = begin; i < end; ++i) {
          float expected = 0.125F;
          for (int rank = 0; rank < size; ++rank) expected += wire_value(rank, 0, i, wire);
          ASSERT_EQ(std::memcmp(&acc[static_cast<std::size_t>(i - begin)], &expected, 4), 0)
              << "element " << i << " of " << kernels::name_of(wire) << ", size " << size;
        }
        // Only what lies in other ranks' memory was moved between ranks.
        EXPECT_EQ(view.channel.reduced_bytes(),
                  static_cast<std::size_t>((end - begin) * (size - 1)) * kernels::bytes_of(wire));
        view.channel.wait_folded_by_all("the end", patient());
        EXPECT_TRUE(view.channel.folded_by_all());
      });
    }
  }
}

TEST(SharedChannel, EmptyContributionsAreZerosAndRanksMayUseDifferentTypes) {
  with_channels(4, kSpec, [](RankView view) {
    // Rank 0 in fp32, rank 1 nothing, rank 2 in bf16, rank 3 nothing.
    const Dtype wire = view.rank == 0 ? Dtype::kFloat32 : Dtype::kBFloat16;
    const PostId post = view.rank % 2 == 1 ? view.channel.post({}, Dtype::kBFloat16, all_of(256))
                                           : post_values(view, 256, wire, 0, all_of(256));
    std::vector<float> acc(256, 1e9F);
    view.channel.fold(post, 0, 256, acc.data(), Accumulator::kFresh, "bucket", patient());
    for (std::int64_t i = 0; i < 256; ++i) {
      ASSERT_EQ(acc[static_cast<std::size_t>(i)],
                0.0F + value(0, 0, i) + wire_value(2, 0, i, Dtype::kBFloat16));
    }
    // A bucket that nobody has anything of, and a rank without a slice of it.
    const PostId nothing = post_nothing(view);
    acc.assign(256, 7.0F);
    if (view.rank == 0) {
      view.channel.fold(nothing, 0, 0, nullptr, Accumulator::kContinue, "bucket", patient());
    } else {
      view.channel.fold(nothing, 0, 256, acc.data(), Accumulator::kFresh, "bucket", patient());
      EXPECT_EQ(acc, std::vector<float>(256, 0.0F));
    }
    if (view.rendezvous.nodes().count() == 1) {  // else buffers of messages as well
      EXPECT_EQ(view.channel.staging_bytes(), view.rank % 2 == 1 ? 0U : Segment::kPage);
    }
  });
}

TEST(SharedChannel, SlotsAreReusedOnlyAfterAllHaveFoldedUnderRandomPauses) {
  constexpr std::int64_t kNumel = 3000;
  constexpr std::uint64_t kPosts = 200;
  ChannelSpec spec = kSpec;
  spec.staging_slots = 3;
  spec.posts_in_flight = 3;
  for (int size : {2, 4}) {
    with_channels(size, spec, [&](RankView view) {
      // Posting runs up to three ahead of folding, in a thread of its own as in an engine; every
      // rank is sometimes the slow one.
      std::atomic<std::uint64_t> posts_made{0};
      std::atomic<std::uint64_t> folds_made{0};
      std::thread folding([&] {
        Pauses pause(view.rank + 10, 100);
        std::vector<float> acc(kNumel);
        for (PostId post = 0; post < kPosts; ++post) {
          while (posts_made.load() <= post) std::this_thread::yield();
          if (post % 5 == 0) pause();
          view.channel.fold(post, 0, kNumel, acc.data(), Accumulator::kFresh, "bucket", patient());
          for (std::int64_t i = 0; i < kNumel; i += 17) {
            float expected = 0.0F;
            for (int rank = 0; rank < size; ++rank) expected += value(rank, post, i);
            ASSERT_EQ(acc[static_cast<std::size_t>(i)], expected) << "post " << post;
          }
          folds_made.store(post + 1);
        }
      });
      Pauses pause(view.rank, 100);
      for (std::uint64_t post = 0; post < kPosts; ++post) {
        if (post % 3 == 0) view.channel.wait_folded_by_all("three posts", patient());
        pause();
        post_values(view, kNumel, Dtype::kFloat32, post, all_of(kNumel));
        posts_made.store(post + 1);
      }
      folding.join();
      EXPECT_EQ(folds_made, kPosts);
    });
  }
}

TEST(SharedChannel, RefusesMoreStagingThanAgreedInsteadOfBlocking) {
  with_channels(1, kSpec, [](RankView view) {
    std::vector<Staging> held;
    std::set<std::byte*> distinct;
    for (std::size_t i = 0; i < kSpec.staging_slots; ++i) {
      held.push_back(view.channel.acquire(100));
      distinct.insert(held.back().data);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(held.back().data) % 64, 0U);
    }
    EXPECT_EQ(distinct.size(), kSpec.staging_slots);
    EXPECT_THROW(view.channel.acquire(100), InvalidArgument);
    view.channel.give_back(held[2]);
    EXPECT_THROW(view.channel.give_back(held[2]), InvalidArgument) << "twice";
    EXPECT_EQ(view.channel.acquire(50).data, held[2].data);
    EXPECT_THROW(view.channel.acquire(kSpec.largest_staging + 1), InvalidArgument);
  });
}

TEST(SharedChannel, RefusesMorePostsInFlightThanTheRingHolds) {
  with_channels(1, kSpec, [](RankView view) {
    // posts_in_flight 4 makes a ring of 8 records.
    for (int i = 0; i < 8; ++i) post_nothing(view);
    EXPECT_THROW(post_nothing(view), InvalidArgument);
    EXPECT_THROW(
        view.channel.fold(1, 0, 0, nullptr, Accumulator::kContinue, "out of order", patient()),
        InvalidArgument);
  });
}

TEST(SharedChannel, PrefersHotMemoryAndTrimsWhatIsIdle) {
  with_channels(1, kSpec, [](RankView view) {
    Channel& channel = view.channel;
    const Staging small = channel.acquire(Segment::kPage);
    const Staging large = channel.acquire(8 * Segment::kPage);
    EXPECT_EQ(channel.staging_bytes(), 9 * Segment::kPage);
    channel.give_back(large);
    channel.give_back(small);
    EXPECT_EQ(channel.acquire(100).slot, small.slot) << "used last";
    EXPECT_EQ(channel.acquire(2 * Segment::kPage).slot, large.slot) << "large enough";
    EXPECT_EQ(channel.staging_bytes(), 9 * Segment::kPage);
    channel.give_back(large);
    channel.trim(2);
    EXPECT_EQ(channel.staging_bytes(), 9 * Segment::kPage);
    channel.trim(2);
    EXPECT_EQ(channel.staging_bytes(), Segment::kPage) << "the small one is held";
    const Staging again = channel.acquire(8 * Segment::kPage);
    std::memset(again.data, 1, again.bytes);
    EXPECT_EQ(channel.staging_bytes(), 9 * Segment::kPage);
  });
}

TEST(SharedChannel, ASlowPeerIsWaitedFor) {
  with_channels(3, kSpec, [](RankView view) {
    if (view.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(80));
    const PostId post = post_values(view, 100, Dtype::kFloat32, 0, all_of(100));
    EXPECT_FALSE(view.rank == 1 && view.channel.folded_by_all());
    std::vector<float> acc(100);
    view.channel.fold(post, 0, 100, acc.data(), Accumulator::kFresh, "bucket 0", patient());
    EXPECT_EQ(acc[5], 0.0F + value(0, 0, 5) + value(1, 0, 5) + value(2, 0, 5));
  });
}

TEST(SharedChannel, ADeadlineNamesWhatIsMissing) {
  with_channels(4, kSpec, [](RankView view) {
    if (view.rank == 1 || view.rank == 3) return;
    const PostId post = post_nothing(view);
    const auto begin = Clock::now();
    try {
      view.channel.fold(post, 0, 0, nullptr, Accumulator::kContinue, "reduction of bucket 3",
                        soon());
      ADD_FAILURE() << "folded without ranks 1 and 3";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("'critic'"), HasSubstr("bucket 3"),
                                      HasSubstr("missing rank 1, 3")));
    }
    const auto waited = Clock::now() - begin;
    EXPECT_GE(waited, std::chrono::milliseconds(150));
    EXPECT_LT(waited, std::chrono::seconds(20));
    EXPECT_THROW(view.channel.wait_folded_by_all("x", soon()), Timeout);
    view.channel.post_gather({});
    EXPECT_THROW(view.channel.wait_gathered_by_all("x", soon()), Timeout);
  });
}

TEST(SharedChannel, AnAbortEndsEveryWait) {
  with_channels(3, kSpec, [](RankView view) {
    if (view.rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      view.control.abort("rank 2 failed");
      return;
    }
    const auto broken = [](const std::function<void()>& wait) {
      try {
        wait();
        ADD_FAILURE() << "rank 2 took part";
      } catch (const WorldBroken& error) {
        EXPECT_STREQ(error.what(), "rank 2 failed");
      }
    };
    const auto begin = Clock::now();
    const PostId post = post_nothing(view);
    broken([&] { view.channel.fold(post, 0, 0, nullptr, Accumulator::kContinue, "x", patient()); });
    broken([&] { view.channel.wait_folded_by_all("x", patient()); });
    const std::uint64_t gather = view.channel.post_gather({});
    broken([&] {
      view.channel.gather(
          gather,
          [](int rank) {
            const auto begin = static_cast<std::size_t>(rank) * 64;
            return ByteRange{begin, begin + 64};
          },
          "x", patient());
    });
    broken([&] { view.channel.wait_gathered_by_all("x", patient()); });
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
  });
}

TEST(SharedChannel, GathersEveryRanksPartInPlaceAndCountsIt) {
  for (int size = 1; size <= 4; ++size) {
    with_channels(size, kSpec, [size](RankView view) {
      const auto parameters = view.channel.parameters();
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(parameters.get()) % 64, 0U);
      // Uneven parts; the last rank of several has none.
      const auto part = [size](int rank) {
        const auto begin = static_cast<std::size_t>(rank) * 10000;
        return ByteRange{begin, rank > 0 && rank == size - 1 ? begin : begin + 10000};
      };
      Pauses pause(view.rank, 300);
      std::size_t from_peers = 0;
      for (int rank = 0; rank < size; ++rank) {
        if (rank != view.rank) from_peers += part(rank).end - part(rank).begin;
      }
      for (int update = 1; update <= 50; ++update) {
        const ByteRange mine = part(view.rank);
        view.channel.wait_gathered_by_all("before writing", patient());
        std::memset(parameters.get() + mine.begin, update + view.rank, mine.end - mine.begin);
        const std::uint64_t gather = view.channel.post_gather({});
        pause();
        view.channel.gather(gather, part, "parameters", patient());
        for (int rank = 0; rank < size; ++rank) {
          for (std::size_t i = part(rank).begin; i < part(rank).end; i += 999) {
            ASSERT_EQ(parameters.get()[i], static_cast<std::byte>(update + rank));
          }
        }
        EXPECT_EQ(view.channel.gathered_bytes(), from_peers * static_cast<std::size_t>(update));
      }
    });
  }
}

TEST(SharedChannel, ParametersOutliveTheChannel) {
  std::shared_ptr<std::byte> parameters;
  with_channels(1, kSpec, [&](RankView view) {
    parameters = view.channel.parameters();
    parameters.get()[9] = std::byte{9};
  });
  EXPECT_EQ(parameters.get()[9], std::byte{9});
}

TEST(SharedDataPlane, AFullMemoryIsTheSameErrorOnAllRanks) {
  std::vector<std::string> texts(3);
  ChannelSpec spec = kSpec;
  spec.parameter_bytes = available_memory().available_bytes + (std::size_t{8} << 30);
  with_channels(3, kSpec, [&](RankView view) {
    try {
      view.plane.open(spec, patient());
    } catch (const OutOfMemory& error) {
      texts[static_cast<std::size_t>(view.rank)] = error.what();
    }
    EXPECT_EQ(view.plane.open(kSpec, patient())->group().size, 3) << "the plane still works";
  });
  EXPECT_THAT(texts[0],
              AllOf(HasSubstr("'critic'"), HasSubstr("bucket_bytes"), HasSubstr("rank 0")));
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST(SharedDataPlane, DifferentSpecsAreAnErrorOnAllRanks) {
  with_channels(2, kSpec, [](RankView view) {
    ChannelSpec spec = kSpec;
    spec.parameter_bytes += static_cast<std::size_t>(view.rank);
    EXPECT_THROW(view.plane.open(spec, patient()), Mismatch);
  });
}

}  // namespace
}  // namespace tandem::comm
