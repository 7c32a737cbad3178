// What channels do between nodes, and with one parameter memory a node. What they do anyhow is in
// channel_test.cpp, which runs for every division into nodes as well.
#include "comm/planes.h"
#include "comm/shared_channel.h"
#include "tests/comm/thread_ranks.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <atomic>
#include <cstring>

namespace tandem::comm {
namespace {

using kernels::Accumulator;
using kernels::Dtype;
using testing::AllOf;
using testing::HasSubstr;

struct RankView {
  Rendezvous& rendezvous;
  ControlPlane& control;
  DataPlane& plane;
  int rank;
  int size;
};

void with_planes(int size, const RankShape& shape, const std::function<void(RankView)>& body) {
  SCOPED_TRACE(describe(size, shape));
  on_thread_ranks(
      size,
      [&](Rendezvous& rendezvous) {
        const auto control = make_control_plane(rendezvous, patient());
        const auto plane = make_data_plane(rendezvous, *control);
        body(RankView{rendezvous, *control, *plane, rendezvous.group().rank, size});
      },
      shape);
}

/// On nodes of `ranks_per_node`, whose messages are those of threads and those of a store.
void with_messages(int size, int ranks_per_node, const std::function<void(RankView)>& body) {
  for (const bool over_store : {false, true}) {
    with_planes(size, {.nodes = {.ranks_per_node = ranks_per_node}, .over_store = over_store},
                body);
  }
}

PartOfRank dealt(std::int64_t numel, int size) {
  return [=](int rank) { return ElementRange{numel * rank / size, numel * (rank + 1) / size}; };
}

/// Thirds: sums depend on their order.
float value(int rank, std::uint64_t post, std::int64_t i) {
  return static_cast<float>((i * 7 + static_cast<std::int64_t>(post)) % 1009 - 500) / 3.0F *
         static_cast<float>(rank * 37 + 1);
}

PostId post_values(Channel& channel, RankView view, std::int64_t numel, std::uint64_t post) {
  const Staging staging = channel.acquire(static_cast<std::size_t>(numel) * sizeof(float));
  for (std::int64_t i = 0; i < numel; ++i) {
    reinterpret_cast<float*>(staging.data)[i] = value(view.rank, post, i);
  }
  return channel.post(staging, Dtype::kFloat32, dealt(numel, view.size));
}

TEST(NodesChannel, SlicesOfAnySizeAreFoldedInRankOrderAndCounted) {
  constexpr std::int64_t kLargest = 6'553'600;  // 25 MiB
  for (const RankShape& shape : node_shapes(3)) {
    with_planes(3, shape, [](RankView view) {
      const auto channel = view.plane.open({.name = "critic",
                                            .largest_staging = kLargest * sizeof(float),
                                            .staging_slots = 1,
                                            .posts_in_flight = 1},
                                           patient());
      std::uint64_t read = 0;
      std::uint64_t crossed = 0;
      std::uint64_t posts = 0;
      for (const std::int64_t numel : {0L, 1L, 2L, 1023L, 100'001L, static_cast<long>(kLargest)}) {
        const ElementRange mine = dealt(numel, view.size)(view.rank);
        const std::int64_t count = mine.end - mine.begin;
        std::vector<float> acc(static_cast<std::size_t>(count));
        const PostId post = post_values(*channel, view, numel, posts++);
        channel->fold(post, mine.begin, count, acc.data(), Accumulator::kFresh, "bucket",
                      patient());
        for (std::int64_t i = 0; i < count; ++i) {
          float expected = 0.0F;
          for (int rank = 0; rank < view.size; ++rank) {
            expected += value(rank, post, mine.begin + i);
          }
          ASSERT_EQ(acc[static_cast<std::size_t>(i)], expected) << "element " << i;
        }
        for (int rank = 0; rank < view.size; ++rank) {
          const std::uint64_t bytes = static_cast<std::uint64_t>(count) * sizeof(float);
          if (rank != view.rank) read += bytes;
          if (!view.rendezvous.nodes().together(rank, view.rank)) crossed += bytes;
        }
        channel->wait_folded_by_all("the end", patient());
      }
      EXPECT_EQ(channel->reduced_bytes(), read);
      EXPECT_EQ(channel->between_nodes_bytes(), crossed);
    });
  }
}

// A receive buffer serves many posts and goes when it has been idle.
TEST(NodesChannel, BuffersOfMessagesAreReusedAndTrimmed) {
  with_messages(2, 1, [](RankView view) {
    constexpr std::int64_t kNumel = 4096;
    const auto channel = view.plane.open({.name = "critic",
                                          .largest_staging = kNumel * sizeof(float),
                                          .staging_slots = 1,
                                          .posts_in_flight = 1},
                                         patient());
    std::vector<float> acc(kNumel / 2);
    for (std::uint64_t k = 0; k < 20; ++k) {
      const PostId post = post_values(*channel, view, kNumel, k);
      channel->fold(post, view.rank * kNumel / 2, kNumel / 2, acc.data(), Accumulator::kFresh,
                    "bucket", patient());
      channel->wait_folded_by_all("the end", patient());
    }
    // One slot of four pages; of the other rank's half of it at most two at once.
    EXPECT_GT(channel->staging_bytes(), 4 * Segment::kPage);
    EXPECT_LE(channel->staging_bytes(), 8 * Segment::kPage);
    view.rendezvous.all_gather("all are through", "", patient());
    channel->trim(1);
    EXPECT_EQ(channel->staging_bytes(), 0U);
  });
}

// Two engines' buckets in one queue, posted ahead in a thread of their own.
TEST(NodesChannel, SeveralChannelsDoNotHoldEachOtherUp) {
  constexpr std::int64_t kNumel = 2000;
  constexpr std::uint64_t kPosts = 60;
  for (const RankShape& shape : node_shapes(4)) {
    with_planes(4, shape, [](RankView view) {
      std::vector<std::unique_ptr<Channel>> channels;
      for (const char* name : {"actor", "critic"}) {
        channels.push_back(view.plane.open({.name = name,
                                            .largest_staging = kNumel * sizeof(float),
                                            .staging_slots = kPosts,
                                            .posts_in_flight = kPosts},
                                           patient()));
      }
      std::thread posting([&] {
        Pauses pause(view.rank, 200);
        for (std::uint64_t k = 0; k < kPosts; ++k) {
          pause();
          for (const auto& channel : channels) post_values(*channel, view, kNumel, k);
        }
      });
      const ElementRange mine = dealt(kNumel, view.size)(view.rank);
      std::vector<float> acc(static_cast<std::size_t>(mine.end - mine.begin));
      Pauses pause(view.rank + 10, 200);
      for (std::uint64_t k = 0; k < kPosts; ++k) {
        if (k % 4 == 0) pause();
        for (const auto& channel : channels) {
          channel->fold(k, mine.begin, mine.end - mine.begin, acc.data(), Accumulator::kFresh,
                        "bucket", patient());
          float expected = 0.0F;
          for (int rank = 0; rank < view.size; ++rank) expected += value(rank, k, mine.begin + 9);
          ASSERT_EQ(acc[9], expected) << "post " << k;
        }
      }
      posting.join();
      for (const auto& channel : channels) channel->wait_folded_by_all("the end", patient());
    });
  }
}

TEST(NodesChannel, APartOfAnotherSizeThanFoldedIsAMismatch) {
  with_messages(2, 1, [](RankView view) {
    const auto channel = view.plane.open(
        {.name = "critic", .largest_staging = 4096, .staging_slots = 2, .posts_in_flight = 2},
        patient());
    // Rank 1 believes that the bucket has 60 elements.
    const PostId post = post_values(*channel, view, view.rank == 0 ? 64 : 60, 0);
    std::vector<float> acc(32);
    if (view.rank == 0) {
      try {
        channel->fold(post, 0, 32, acc.data(), Accumulator::kFresh, "bucket 7", patient());
        ADD_FAILURE() << "folded what does not fit";
      } catch (const Mismatch& error) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("bucket 7"), HasSubstr("rank 1 that has 30")));
      }
      // A part beyond the end is refused before it is sent.
      const Staging staging = channel->acquire(64);
      EXPECT_THROW(channel->post(staging, Dtype::kFloat32,
                                 [](int) {
                                   return ElementRange{0, 17};
                                 }),
                   Mismatch);
    }
    view.rendezvous.all_gather("the end", "", patient());
  });
}

// Rank 1 posts and never folds: its peers have what they need of it, and wait for it to take
// theirs. (A store takes it, so over one nobody waits.)
TEST(NodesChannel, ARankThatDoesNotReceiveIsNamed) {
  with_planes(2, {.nodes = {.ranks_per_node = 1}}, [](RankView view) {
    const auto channel = view.plane.open(
        {.name = "critic", .largest_staging = 1 << 16, .staging_slots = 1, .posts_in_flight = 1},
        patient());
    const PostId post = post_values(*channel, view, 1 << 14, 0);
    if (view.rank == 0) {
      std::vector<float> acc(1 << 13);
      try {
        channel->fold(post, 0, 1 << 13, acc.data(), Accumulator::kFresh, "bucket 7", soon());
        ADD_FAILURE() << "rank 1 did not receive anything";
      } catch (const Timeout& error) {
        EXPECT_THAT(error.what(), HasSubstr("missing rank 1;"));
      }
      EXPECT_FALSE(channel->folded_by_all());
      EXPECT_THROW(channel->wait_folded_by_all("x", soon()), Timeout);
    }
    view.rendezvous.all_gather("the end", "", patient());
  });
}

TEST(NodesChannel, AGatherNamesTheRankWhosePartDoesNotCome) {
  with_messages(3, 2, [](RankView view) {
    const auto channel =
        view.plane.open({.name = "critic", .parameter_bytes = 3 * 4096}, patient());
    const auto part = [](int rank) {
      const auto begin = static_cast<std::size_t>(rank) * 4096;
      return ByteRange{begin, begin + 4096};
    };
    if (view.rank != 2) {
      const std::uint64_t gather = channel->post_gather({});
      try {
        channel->gather(gather, part, "parameters of bucket 7", soon());
        ADD_FAILURE() << "rank 2 did not come";
      } catch (const Timeout& error) {
        // Rank 0 relays what rank 2 has, so that is whom rank 1 misses.
        EXPECT_THAT(error.what(),
                    AllOf(HasSubstr("bucket 7"),
                          HasSubstr(view.rank == 0 ? "missing rank 2;" : "missing rank 0;")));
      }
    }
    view.rendezvous.all_gather("the end", "", patient());
  });
}

/// Runs `updates` of a model of `bytes` bytes: every rank writes its part, gathers, and compares
/// all of it. Parts are uneven and the last rank's is empty.
void gather_again_and_again(RankView view, Channel& channel, int updates) {
  const auto part = [&](int rank) {
    const auto begin = static_cast<std::size_t>(rank) * 10'000;
    const bool none = rank > 0 && rank == view.size - 1;
    return ByteRange{begin, none ? begin : begin + 10'000 - static_cast<std::size_t>(rank)};
  };
  const auto parameters = channel.parameters();
  Pauses pause(view.rank, 300);
  for (int update = 1; update <= updates; ++update) {
    const ByteRange mine = part(view.rank);
    channel.wait_gathered_by_all("before writing", patient());
    std::memset(parameters.get() + mine.begin, update + view.rank, mine.end - mine.begin);
    const std::uint64_t gather = channel.post_gather({});
    pause();
    channel.gather(gather, part, "parameters", patient());
    for (int rank = 0; rank < view.size; ++rank) {
      for (std::size_t i = part(rank).begin; i < part(rank).end; i += 499) {
        ASSERT_EQ(parameters.get()[i], static_cast<std::byte>(update + rank)) << "rank " << rank;
      }
    }
    // Whoever shares a memory writes again when the others agree to it, as a step does.
    view.rendezvous.all_gather("compared", "", patient());
  }
}

TEST(NodesChannel, APartComesToANodeOnce) {
  for (int size = 2; size <= 4; ++size) {
    for (const RankShape& shape : node_shapes(size)) {
      std::atomic<std::uint64_t> crossed{0};
      std::atomic<std::uint64_t> expected{0};
      with_planes(size, shape, [&](RankView view) {
        const auto channel =
            view.plane.open({.name = "critic", .parameter_bytes = 40'000}, patient());
        gather_again_and_again(view, *channel, 10);
        crossed += channel->between_nodes_bytes();
        // This rank's part, once to each other node, ten times.
        const std::uint64_t mine =
            view.rank == size - 1 ? 0 : 10'000 - static_cast<std::uint64_t>(view.rank);
        expected += 10 * mine * static_cast<std::uint64_t>(view.rendezvous.nodes().count() - 1);
      });
      EXPECT_EQ(crossed, expected) << describe(size, shape);
    }
  }
}

ChannelSpec shared_spec() {
  return {.name = "critic", .parameter_bytes = 40'000, .share_parameters = true};
}

TEST(SharedParameters, RanksOfANodeHaveOneMemory) {
  for (const RankShape& shape : node_shapes(4)) {
    with_planes(4, shape, [&](RankView view) {
      const auto channel = view.plane.open(shared_spec(), patient());
      // Fresh memory is zero.
      channel->parameters().get()[view.rank] = std::byte{1};
      view.rendezvous.all_gather("all have written", "", patient());
      for (int rank = 0; rank < 4; ++rank) {
        EXPECT_EQ(channel->parameters().get()[rank] == std::byte{1},
                  view.rendezvous.nodes().together(rank, view.rank));
      }
      // Nobody's memory ends while another compares.
      view.rendezvous.all_gather("all have looked", "", patient());
    });
  }
}

TEST(SharedParameters, GathersAreBarriersWithoutCopies) {
  for (int size = 1; size <= 4; ++size) {
    for (const RankShape& shape : node_shapes(size)) {
      with_planes(size, shape, [](RankView view) {
        const auto channel = view.plane.open(shared_spec(), patient());
        gather_again_and_again(view, *channel, 50);
        EXPECT_EQ(channel->gathered_bytes(), channel->between_nodes_bytes());
      });
    }
  }
}

TEST(SharedParameters, AreCommittedOnceANode) {
  const Nodes nodes = Nodes::consecutive(4, 2);
  ChannelSpec spec = shared_spec();
  const std::size_t pages = (spec.parameter_bytes + Segment::kPage - 1) / Segment::kPage;
  const auto committed = [&](int rank) {
    return SharedChannel::make_segment(spec, rank, nodes)->committed_bytes();
  };
  EXPECT_EQ(committed(0), committed(1) + pages * Segment::kPage);
  EXPECT_EQ(committed(2), committed(0));
  EXPECT_EQ(committed(3), committed(1));
  spec.share_parameters = false;
  EXPECT_EQ(committed(1), committed(0));
}

TEST(SharedParameters, OutliveEveryChannelOfTheNode) {
  std::array<std::shared_ptr<std::byte>, 2> memory;
  with_planes(2, {}, [&](RankView view) {
    const auto channel = view.plane.open(shared_spec(), patient());
    memory[static_cast<std::size_t>(view.rank)] = channel->parameters();
    if (view.rank == 0) channel->parameters().get()[5] = std::byte{5};
  });
  memory[0].reset();
  EXPECT_EQ(memory[1].get()[5], std::byte{5});
}

TEST(SharedParameters, RanksThatWantItDifferentlyMismatch) {
  with_planes(2, {}, [](RankView view) {
    ChannelSpec spec = shared_spec();
    spec.share_parameters = view.rank == 0;
    EXPECT_THROW(view.plane.open(spec, patient()), Mismatch);
  });
}

}  // namespace
}  // namespace tandem::comm
