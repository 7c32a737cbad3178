// What a rendezvous over a store does beyond what every rendezvous does (rendezvous_test.cpp): who
// belongs to a world, and what is left behind.
#include "comm/collective_try.h"
#include "comm/planes.h"
#include "tests/comm/thread_ranks.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <array>
#include <barrier>

namespace tandem::comm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::unique_ptr<Rendezvous> join(const std::shared_ptr<Store>& store,
                                 Group group,
                                 Deadline deadline) {
  return make_store_rendezvous(store, StoreRanks{.group = group}, deadline);
}

/// Long enough for those that do come, on a loaded machine.
Deadline in_a_second() { return Deadline::after(std::chrono::seconds(1)); }

template <class Expected>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return "no error";
}

TEST(StoreRendezvous, ARankThatNeverComesIsNamedTheSameOnAllRanks) {
  for (int absent = 0; absent < 3; ++absent) {
    const auto store = std::make_shared<FakeStore>();
    std::array<std::string, 3> texts;
    on_threads(3, [&](int rank) {
      if (rank == absent) return;
      texts[static_cast<std::size_t>(rank)] = error_of<Timeout>([&] {
        join(store, Group{rank, 3}, soon());
      });
    });
    const auto one = static_cast<std::size_t>(absent == 0 ? 1 : 0);
    const auto other = static_cast<std::size_t>(absent == 2 ? 1 : 2);
    EXPECT_THAT(texts[one], HasSubstr("rank " + std::to_string(absent) + " of 3 did not come"));
    EXPECT_EQ(texts[one], texts[other]);
  }
}

TEST(StoreRendezvous, ARankThatWasToldAnotherSizeIsNamed) {
  const auto store = std::make_shared<FakeStore>();
  on_threads(2, [&](int rank) {
    const std::string text = error_of<Timeout>([&] {
      join(store, Group{rank, rank == 0 ? 2 : 3}, in_a_second());
    });
    if (rank == 0) {
      EXPECT_THAT(text, AllOf(HasSubstr("rank 1 of 2 did not come"), HasSubstr("WORLD_SIZE=3")));
    }
  });
}

TEST(StoreRendezvous, TwoProcessesThatClaimOneRankAreToldApart) {
  const auto store = std::make_shared<FakeStore>();
  std::atomic<int> refused{0};
  on_threads(2, [&](int) {
    try {
      join(store, Group{1, 3}, in_a_second());
    } catch (const SystemError& error) {
      EXPECT_THAT(error.what(), HasSubstr("RANK=1"));
      ++refused;
    } catch (const Timeout&) {
    }
  });
  EXPECT_EQ(refused, 1) << "who came last waits for the others";
}

// V1: processes of an earlier attempt have left the keys of a world that was half made or half
// used.
TEST(StoreRendezvous, KeysOfEarlierAttemptsAreNotTakenForThisWorlds) {
  const auto store = std::make_shared<FakeStore>();
  // Ranks 0 and 1 of three, of which rank 2 never came; then all three, ended without close().
  on_threads(2, [&](int rank) { EXPECT_THROW(join(store, Group{rank, 3}, soon()), Timeout); });
  on_threads(3, [&](int rank) {
    const auto rendezvous = join(store, Group{rank, 3}, patient());
    rendezvous->all_gather("x", "old", patient());
  });
  for (int attempt = 0; attempt < 5; ++attempt) {
    on_threads(3, [&](int rank) {
      Pauses(rank + attempt, 3000)();
      const auto rendezvous = join(store, Group{rank, 3}, patient());
      const std::string text = std::to_string(attempt * 10 + rank);
      const auto texts = rendezvous->all_gather("x", text, patient());
      for (int of = 0; of < 3; ++of) {
        EXPECT_EQ(texts[static_cast<std::size_t>(of)], std::to_string(attempt * 10 + of));
      }
      if (attempt % 2 == 0) rendezvous->close(patient());
    });
  }
}

TEST(StoreRendezvous, WorldsAreMadeOneAfterAnotherAndLeaveNothingBehindThatGrows) {
  const auto store = std::make_shared<FakeStore>();
  std::array<std::size_t, 4> keys{};
  for (std::size_t& left : keys) {
    on_threads(3, [&](int rank) {
      const auto rendezvous = join(store, Group{rank, 3}, patient());
      const auto control = make_control_plane(*rendezvous, patient());
      control->post(Message{});
      rendezvous->close(patient());
    });
    left = store->values().size();
  }
  EXPECT_EQ(keys[1], keys[3]);
}

TEST(StoreRendezvous, TextsLongerThanAValueOfTheStoreAreGathered) {
  on_thread_ranks(
      2,
      [](Rendezvous& rendezvous) {
        const auto text = [](int rank) {
          return std::string((std::size_t{3} << 20) + static_cast<std::size_t>(rank), 'a') + "z";
        };
        const auto texts = rendezvous.all_gather("x", text(rendezvous.group().rank), patient());
        EXPECT_TRUE(texts[0] == text(0));
        EXPECT_TRUE(texts[1] == text(1));
        EXPECT_EQ(rendezvous.all_gather("x", "", patient())[1], "");
      },
      RankShape{.over_store = true});
}

TEST(StoreRendezvous, AStoreThatDiesIsTheSystemErrorOfEveryCall) {
  const auto store = std::make_shared<FakeStore>();
  std::barrier all_are_there(2);
  on_threads(2, [&](int rank) {
    const auto rendezvous = join(store, Group{rank, 2}, patient());
    const auto messages = rendezvous->make_messenger("x", patient());
    all_are_there.arrive_and_wait();
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      store->break_now();
    }
    // Rank 1 waits for rank 0 when it happens.
    EXPECT_THAT(error_of<SystemError>([&] { rendezvous->all_gather("x", "", patient()); }),
                HasSubstr("does not answer"));
    EXPECT_THAT(error_of<SystemError>([&] {
                  join(store, Group{rank, 2}, patient());
                }),
                HasSubstr("does not answer"));
  });
}

// The planes' side of it: every wait ends at once with the store's words, and abort() does not
// throw, since destructors call it.
TEST(StoreRendezvous, AStoreThatDiesEndsTheRoundsOfTheControlPlane) {
  const auto store = std::make_shared<FakeStore>();
  std::barrier all_are_there(2);
  on_threads(2, [&](int rank) {
    const auto rendezvous =
        join_over(store, Group{rank, 2}, {.nodes = {.ranks_per_node = 1}, .over_store = true});
    const auto control = make_control_plane(*rendezvous, patient());
    all_are_there.arrive_and_wait();
    store->break_now();
    const RoundId round = rank == 0 ? control->post(Message{}) : 0;
    const Deadline deadline = patient();
    while (!control->aborted() && !deadline.passed()) {
      control->wait_for_change(control->change(), Clock::now() + std::chrono::milliseconds(5));
    }
    EXPECT_THAT(control->aborted().value_or(""), HasSubstr("does not answer"));
    if (rank == 0) {
      EXPECT_THAT(error_of<SystemError>([&] { static_cast<void>(control->test(round)); }),
                  HasSubstr("does not answer"));
    }
    EXPECT_NO_THROW(control->abort("rank ends"));
  });
}

}  // namespace
}  // namespace tandem::comm
