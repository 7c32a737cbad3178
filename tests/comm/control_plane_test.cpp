#include "comm/message_control_plane.h"
#include "comm/planes.h"
#include "tests/comm/thread_ranks.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <atomic>

namespace tandem::comm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Message wait_message(ControlPlane& plane, RoundId round) {
  const Deadline deadline = patient();
  while (!deadline.passed()) {
    const std::uint32_t seen = plane.change();
    if (auto message = plane.test(round)) return *message;
    plane.wait_for_change(seen, deadline.at);
  }
  throw Timeout("round " + std::to_string(round));
}

std::vector<std::string> wait_texts(ControlPlane& plane, RoundId round) {
  const Deadline deadline = patient();
  while (!deadline.passed()) {
    const std::uint32_t seen = plane.change();
    if (auto texts = plane.test_texts(round)) return *texts;
    plane.wait_for_change(seen, deadline.at);
  }
  throw Timeout("round " + std::to_string(round));
}

/// Runs `body` with a control plane on every rank, for every division of the ranks into nodes.
void with_planes(int size, const std::function<void(ControlPlane&, Rendezvous&)>& body) {
  on_all_node_shapes(size, [&](Rendezvous& rendezvous) {
    const auto plane = make_control_plane(rendezvous, patient());
    body(*plane, rendezvous);
  });
}

TEST(Message, MergesEachSectionItsOwnWay) {
  Message a{{0b0011, 8}, {5, 7}, {5, 7}, {-3, 10}};
  a.merge(Message{{0b0101, 0}, {6, 2}, {6, 2}, {1, -20}});
  EXPECT_EQ(a, (Message{{0b0111, 8}, {5, 2}, {6, 7}, {-2, -10}}));
}

TEST(Message, RefusesSectionsOfOtherSizes) {
  Message a{{1}, {}, {}, {}};
  EXPECT_THROW(a.merge(Message{{}, {1}, {}, {}}), Mismatch);
}

TEST(ControlPlane, MergesTheMessagesOfAllRanks) {
  for (int size = 1; size <= 4; ++size) {
    with_planes(size, [size](ControlPlane& plane, Rendezvous&) {
      const auto rank = static_cast<std::uint64_t>(plane.group().rank);
      const Message mine{
          {1ULL << rank}, {10 + rank}, {10 + rank}, {-1, static_cast<std::int64_t>(rank)}};
      const RoundId round = plane.post(mine);
      EXPECT_EQ(round, 0U);
      const auto n = static_cast<std::uint64_t>(size);
      // Sums: -1 from each rank; 0 + 1 + ... + (n - 1).
      EXPECT_EQ(wait_message(plane, round),
                (Message{{(1ULL << n) - 1}, {10}, {9 + n}, {-size, size * (size - 1) / 2}}));
      EXPECT_EQ(plane.posted_rounds(), 1U);
      EXPECT_EQ(plane.posted_bytes(), 5 * sizeof(std::uint64_t));
    });
  }
}

TEST(ControlPlane, TwoRoundsMayBeOpenAndBeTakenInAnyOrder) {
  with_planes(3, [](ControlPlane& plane, Rendezvous&) {
    const RoundId gate = plane.post(Message{{}, {}, {}, {1}});
    const RoundId close = plane.post(Message{{}, {}, {}, {10, 20}});
    EXPECT_THROW(plane.post(Message{}), InvalidArgument) << "a third";
    EXPECT_EQ(wait_message(plane, close).sums, (std::vector<std::int64_t>{30, 60}));
    EXPECT_THROW(plane.post(Message{}), InvalidArgument) << "B1: the older one is open";
    EXPECT_EQ(wait_message(plane, gate).sums, std::vector<std::int64_t>{3});
    EXPECT_THROW(plane.test(gate), InvalidArgument) << "taken once";
  });
}

TEST(ControlPlane, ThousandsOfRoundsReuseTheRingUnderRandomPauses) {
  for (int size : {2, 4}) {
    with_planes(size, [size](ControlPlane& plane, Rendezvous& rendezvous) {
      const int rank = plane.group().rank;
      Pauses pause(rank, 60);
      // Without shared memory a round takes some sleeps and the delays of its messages.
      const std::uint64_t rounds = rendezvous.nodes().count() == 1 ? 3000 : 300;
      // Message k is k words of k + rank: a slot overwritten too early gives another size or sum.
      const auto mine = [rank](std::uint64_t k) {
        return Message{
            {}, {}, {}, std::vector<std::int64_t>(k % 40 + 1, static_cast<std::int64_t>(k) + rank)};
      };
      RoundId next_to_take = 0;
      for (std::uint64_t k = 0; k < rounds; ++k) {
        ASSERT_EQ(plane.post(mine(k)), k);
        if (k % 7 == 0) pause();
        if (k == 0) continue;  // keep two open
        const Message merged = wait_message(plane, next_to_take);
        const auto expected =
            static_cast<std::int64_t>(next_to_take) * size + size * (size - 1) / 2;
        ASSERT_EQ(merged.sums, std::vector<std::int64_t>(next_to_take % 40 + 1, expected));
        ++next_to_take;
      }
    });
  }
}

TEST(ControlPlane, CarriesTextsOfDifferentLengths) {
  with_planes(3, [](ControlPlane& plane, Rendezvous&) {
    const auto rank = static_cast<std::size_t>(plane.group().rank);
    // Rank 1's is longer than anything that was reserved.
    const std::size_t lengths[] = {0, 100000, 5};
    const RoundId round = plane.post_text(std::string(lengths[rank], 'x'));
    EXPECT_THAT(wait_texts(plane, round),
                ElementsAre("", std::string(100000, 'x'), std::string(5, 'x')));
  });
}

TEST(ControlPlane, ReservesRoomForLargeMessages) {
  with_planes(2, [](ControlPlane& plane, Rendezvous&) {
    plane.reserve(std::size_t{1} << 20);
    const std::vector<std::uint64_t> words(1 << 17, 3);
    EXPECT_EQ(wait_message(plane, plane.post(Message{words, {}, {}, {}})).ors, words);
    EXPECT_THROW(plane.reserve(std::size_t{1} << 30), InvalidArgument);
  });
}

TEST(ControlPlane, MessagesOfDifferentShapesAreTheSameErrorOnAllRanks) {
  std::vector<std::string> texts(3);
  with_planes(3, [&](ControlPlane& plane, Rendezvous&) {
    const int rank = plane.group().rank;
    const RoundId round =
        rank == 2 ? plane.post(Message{{1, 2}, {}, {}, {}}) : plane.post(Message{{1}, {}, {}, {}});
    try {
      wait_message(plane, round);
    } catch (const Mismatch& error) {
      texts[static_cast<std::size_t>(rank)] = error.what();
    }
    // The rounds go on.
    const RoundId mixed = rank == 0 ? plane.post_text("why") : plane.post(Message{});
    EXPECT_THROW(rank == 0 ? static_cast<void>(wait_texts(plane, mixed))
                           : static_cast<void>(wait_message(plane, mixed)),
                 Mismatch);
  });
  EXPECT_THAT(texts[0], HasSubstr("rank 2 a message of 2 ors"));
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST(ControlPlane, TellsWhoIsMissingAndNeverBlocks) {
  std::atomic<int> looked{0};
  int worlds = 0;
  with_planes(3, [&](ControlPlane& plane, Rendezvous& rendezvous) {
    if (plane.group().rank == 0) ++worlds;
    if (plane.group().rank == 0) {
      const RoundId round = plane.post(Message{});
      EXPECT_FALSE(plane.test(round));
      EXPECT_THAT(plane.missing(round), ElementsAre(1, 2));
      ++looked;
    }
    rendezvous.all_gather("rank 0 has looked", "", patient());
    EXPECT_EQ(looked, worlds);
    if (plane.group().rank != 0) wait_message(plane, plane.post(Message{}));
    if (plane.group().rank == 0) {
      wait_message(plane, 0);
      EXPECT_THAT(plane.missing(0), IsEmpty());
    }
  });
}

TEST(ControlPlane, AnAbortReachesEveryRankWithTheFirstText) {
  with_planes(4, [](ControlPlane& plane, Rendezvous& rendezvous) {
    const int rank = plane.group().rank;
    EXPECT_FALSE(plane.aborted());
    rendezvous.all_gather("all are alive", "", patient());
    if (rank == 2) {
      plane.abort("rank 2 gave up");
      plane.abort("again");
    } else {
      const RoundId round = plane.post(Message{});
      const auto begin = Clock::now();
      try {
        wait_message(plane, round);
        ADD_FAILURE() << "rank 2 never posted";
      } catch (const WorldBroken& error) {
        EXPECT_STREQ(error.what(), "rank 2 gave up");
      }
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
    }
    EXPECT_EQ(plane.aborted(), "rank 2 gave up");
  });
}

TEST(SharedControlPlane, ALongAbortTextIsCut) {
  with_planes(1, [](ControlPlane& plane, Rendezvous&) {
    plane.abort(std::string(10000, 'y'));
    EXPECT_EQ(plane.aborted(), std::string(4096, 'y'));
  });
}

TEST(MessageControlPlane, ALongAbortTextIsCutTheSameEverywhere) {
  on_thread_ranks(2,
                  [](Rendezvous& rendezvous) {
                    const auto plane = make_control_plane(rendezvous, patient());
                    if (rendezvous.group().rank == 0) plane->abort(std::string(10000, 'y'));
                    const RoundId round = plane->post(Message{});
                    EXPECT_THROW(wait_message(*plane, round), WorldBroken);
                    EXPECT_EQ(plane->aborted(), std::string(kAbortTextBytes, 'y'));
                  },
                  {.ranks_per_node = 1});
}

// Rank 0 dies of an error that round 0 told all ranks of: they must all get to hear it, although
// the word of the end may overtake other ranks' messages.
TEST(ControlPlane, ARoundThatAllHadPostedIsToldAfterAnAbort) {
  for (int size = 2; size <= 4; ++size) {
    with_planes(size, [size](ControlPlane& plane, Rendezvous& rendezvous) {
      const int rank = plane.group().rank;
      const RoundId round = plane.post(Message{{}, {}, {}, {1}});
      rendezvous.all_gather("all have posted", "", patient());
      if (rank == 0) plane.abort("rank 0 is through");
      EXPECT_EQ(wait_message(plane, round).sums, std::vector<std::int64_t>{size});
      if (rank == 0) return;
      while (!plane.aborted()) std::this_thread::yield();
      EXPECT_THROW(wait_message(plane, plane.post(Message{})), WorldBroken);
    });
  }
}

// Rank 2 neither posts nor says anything, as if it were dead: after an abort it is not waited for.
TEST(ControlPlane, ASilentRankIsNotWaitedForAfterAnAbort) {
  with_planes(3, [](ControlPlane& plane, Rendezvous& rendezvous) {
    const int rank = plane.group().rank;
    if (rank != 2) {
      const auto begin = Clock::now();
      const RoundId round = plane.post(Message{});
      if (rank == 0) plane.abort("rank 2 does not come");
      try {
        wait_message(plane, round);
        ADD_FAILURE() << "rank 2 never posted";
      } catch (const WorldBroken& error) {
        EXPECT_STREQ(error.what(), "rank 2 does not come");
      }
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds(20));
    }
    rendezvous.all_gather("the end", "", patient());
  });
}

TEST(ControlPlane, WaitsForAChangeEndAtTheirTimeOrByAWake) {
  with_planes(1, [](ControlPlane& plane, Rendezvous&) {
    const std::uint32_t seen = plane.change();
    const auto begin = Clock::now();
    plane.wait_for_change(seen, begin + std::chrono::milliseconds(60));
    EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(60));
    std::thread waker([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      plane.wake();
    });
    plane.wait_for_change(seen, patient().at);
    waker.join();
    EXPECT_NE(plane.change(), seen);
  });
}

}  // namespace
}  // namespace tandem::comm
