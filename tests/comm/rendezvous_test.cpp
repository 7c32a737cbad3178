#include "comm/collective_try.h"
#include "tests/comm/thread_ranks.h"
#include <tandem/error.h>

#include <gmock/gmock.h>

#include <atomic>

namespace tandem::comm {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

TEST(SelfRendezvous, MeetsItself) {
  const auto self = make_self_rendezvous();
  const auto segment = Segment::create("test", 1);
  EXPECT_EQ(self->group().size, 1);
  EXPECT_EQ(self->all_gather("x", "text", soon()), std::vector<std::string>{"text"});
  EXPECT_EQ(self->exchange("x", segment, soon()).at(0), segment);
  self->close(soon());
}

/// Those of threads, and of processes that share a store.
const std::vector<RankShape> kKinds{RankShape{}, RankShape{.over_store = true}};

TEST(Rendezvous, GathersTextsOfDifferentLengthsInRankOrder) {
  for (const RankShape& kind : kKinds) {
    for (int size = 1; size <= 4; ++size) {
      SCOPED_TRACE(describe(size, kind));
      on_thread_ranks(
          size,
          [size](Rendezvous& rendezvous) {
            Pauses pause(rendezvous.group().rank, 200);
            for (int round = 0; round < 50; ++round) {
              const auto text = [round](int rank) {
                return std::string(static_cast<std::size_t>(rank * round), 'a') +
                       std::to_string(rank);
              };
              pause();
              const auto texts =
                  rendezvous.all_gather("x", text(rendezvous.group().rank), patient());
              ASSERT_EQ(texts.size(), static_cast<std::size_t>(size));
              for (int rank = 0; rank < size; ++rank) {
                EXPECT_EQ(texts[static_cast<std::size_t>(rank)], text(rank));
              }
            }
            rendezvous.close(patient());
          },
          kind);
    }
  }
}

TEST(ThreadRendezvous, SharesTheMappingItself) {
  std::array<std::atomic<std::byte*>, 3> owners{};
  on_thread_ranks(3, [&](Rendezvous& rendezvous) {
    const auto mine = Segment::create("test", 1);
    owners[static_cast<std::size_t>(rendezvous.group().rank)] = mine->data();
    const auto all = rendezvous.exchange("x", mine, patient());
    for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_EQ(all[rank]->data(), owners[rank]);
  });
}

TEST(Rendezvous, NamesTheRanksThatDoNotCome) {
  for (const RankShape& kind : kKinds) {
    SCOPED_TRACE(describe(4, kind));
    on_thread_ranks(
        4,
        [](Rendezvous& rendezvous) {
          if (rendezvous.group().rank == 1 || rendezvous.group().rank == 3) return;
          try {
            rendezvous.all_gather("opening engine 'a'", "",
                                  Deadline::after(std::chrono::milliseconds(600)));
            ADD_FAILURE() << "met ranks that were not there";
          } catch (const Timeout& error) {
            EXPECT_THAT(error.what(), HasSubstr("opening engine 'a'"));
            EXPECT_THAT(error.what(), AnyOf(HasSubstr("for rank 1, 3;"), HasSubstr("ranks 1, 3 ")));
          }
        },
        kind);
  }
}

TEST(Rendezvous, RanksThatMeetForDifferentThingsAllThrow) {
  for (const RankShape& kind : kKinds) {
    on_thread_ranks(
        3,
        [](Rendezvous& rendezvous) {
          const std::string what = rendezvous.group().rank == 2 ? "engine 'b'" : "engine 'a'";
          EXPECT_THROW(rendezvous.all_gather(what, "", patient()), Mismatch);
        },
        kind);
  }
}

TEST(CollectiveTry, AFailureOnOneRankIsTheSameErrorOnAll) {
  const auto body = [](Rendezvous& rendezvous) {
    try {
      try_on_all_ranks(rendezvous, "opening", "same", patient(), [&] {
        if (rendezvous.group().rank == 1) throw OutOfMemory("no room");
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const OutOfMemory& error) {
      EXPECT_STREQ(error.what(), "opening: rank 1: no room");
    }
    // The ranks are still in step.
    try_on_all_ranks(rendezvous, "again", "same", patient(), [] {});
    const std::string mine = std::to_string(rendezvous.group().rank / 2);
    EXPECT_THROW(try_on_all_ranks(rendezvous, "again", mine, patient(), [] {}), Mismatch);
  };
  for (const RankShape& kind : kKinds) on_thread_ranks(3, body, kind);
}

}  // namespace
}  // namespace tandem::comm
