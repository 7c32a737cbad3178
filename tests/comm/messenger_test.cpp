// Messengers of thread ranks and over a store here; those of processes have the same tests in
// processes_test.cpp.
#include "tests/comm/messages.h"
#include <tandem/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>

namespace tandem::comm {
namespace {

const ThreadNodes kDelayed{.ranks_per_node = 1, .keys = {}, .delays = {.seed = 5, .max_us = 100}};

TEST(MailboxMessenger, MessagesOfAllSizesComeInOrderFromEveryRank) {
  for (const ThreadNodes& nodes : {ThreadNodes{}, kDelayed}) {
    on_thread_ranks(
        3,
        [](Rendezvous& rendezvous) {
          const auto messenger = rendezvous.make_messenger("test", patient());
          exchange_messages_of_all_sizes(*messenger, rendezvous.group(), 3 * kEagerBytes);
        },
        nodes);
  }
}

TEST(MailboxMessenger, EachIsASpaceOfItsOwn) {
  on_thread_ranks(2, [](Rendezvous& rendezvous) { tell_two_messengers_apart(rendezvous); });
}

// Chunks of 1,000 bytes: messages of several chunks, each larger and each smaller than a notice.
TEST(StoreMessenger, MessagesOfAllSizesComeInOrderFromEveryRank) {
  for (const std::size_t chunk_bytes : {1000, 10'000}) {
    const auto store = std::make_shared<FakeStore>(20);
    on_threads(3, [&](int rank) {
      const auto rendezvous =
          join_over(store, Group{rank, 3}, {.over_store = true, .chunk_bytes = chunk_bytes});
      const auto messenger = rendezvous->make_messenger("test", patient());
      exchange_messages_of_all_sizes(*messenger, rendezvous->group(), 30'000);
      rendezvous->close(patient());
    });
    for (const auto& [key, value] : store->values()) {
      EXPECT_EQ(key.find("chunk/"), std::string::npos) << key << " was received and is there";
      EXPECT_EQ(key.find("gather/"), std::string::npos) << key << " is there after close()";
    }
  }
}

TEST(StoreMessenger, EachIsASpaceOfItsOwn) {
  on_thread_ranks(
      2, [](Rendezvous& rendezvous) { tell_two_messengers_apart(rendezvous); },
      RankShape{.over_store = true});
}

// Y2: what is not received does not fill the store.
TEST(StoreMessenger, ALongMessageWaitsForItsReceiverInTheSendersMemory) {
  const auto store = std::make_shared<FakeStore>();
  on_threads(2, [&](int rank) {
    const auto rendezvous =
        join_over(store, Group{rank, 2}, {.over_store = true, .chunk_bytes = 10'000});
    const auto messenger = rendezvous->make_messenger("test", patient());
    const auto memory = std::make_shared<std::vector<std::byte>>(200'000, std::byte{7});
    if (rank == 0) {
      auto sending = messenger->send(1, 0, memory->data(), memory->size(), memory);
      std::size_t most = 0;
      for (int look = 0; look < 50; ++look) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::size_t bytes = 0;
        for (const auto& [key, value] : store->values()) bytes += value.size();
        most = std::max(most, bytes);
      }
      EXPECT_FALSE(sending->done());
      EXPECT_LT(most, (kStoreWindow + 1) * 10'000);
      EXPECT_GT(most, 10'000U);
      sending.reset();  // abandoned, and received all the same
    }
    rendezvous->all_gather("rank 0 has looked", "", patient());
    if (rank == 1) {
      std::vector<std::byte> into(200'000);
      finish(*next(*messenger, 0)->receive(into.data(), nullptr));
      EXPECT_EQ(into, *memory);
    }
    rendezvous->all_gather("received", "", patient());
  });
}

TEST(StoreMessenger, AStoreThatDiesIsASystemErrorEverywhere) {
  const auto store = std::make_shared<FakeStore>();
  std::barrier all_are_there(2);
  on_threads(2, [&](int rank) {
    const auto rendezvous = join_over(store, Group{rank, 2});
    const auto messenger = rendezvous->make_messenger("test", patient());
    const std::byte byte{};
    all_are_there.arrive_and_wait();
    store->break_now();
    const auto fails = [&](auto&& call) {
      const Deadline deadline = patient();
      try {
        while (!deadline.passed()) call();
        ADD_FAILURE() << "goes on without a store";
      } catch (const SystemError& error) {
        EXPECT_STREQ(error.what(), "the fake store does not answer; start it again");
      }
    };
    fails([&] { static_cast<void>(messenger->probe(kAnyRank)); });
    fails([&] { static_cast<void>(messenger->send(1 - rank, 0, &byte, 1, nullptr)); });
    fails([&] { rendezvous->all_gather("after it", "", patient()); });
    fails([&] { rendezvous->close(patient()); });
  });
}

TEST(MailboxMessenger, MemoryIsTheSendersUntilItIsReceivedAndKeptAliveByThen) {
  on_thread_ranks(2, [](Rendezvous& rendezvous) {
    const auto messenger = rendezvous.make_messenger("test", patient());
    const auto memory = std::make_shared<std::vector<std::byte>>(2 * kEagerBytes, std::byte{7});
    if (rendezvous.group().rank == 0) {
      const auto small = messenger->send(1, 0, memory->data(), kEagerBytes, memory);
      EXPECT_TRUE(small->done()) << "copied";
      auto large = messenger->send(1, 1, memory->data(), memory->size(), memory);
      EXPECT_FALSE(large->done());
      large.reset();  // abandoned
      EXPECT_EQ(memory.use_count(), 2);
    }
    rendezvous.all_gather("sent", "", patient());
    if (rendezvous.group().rank == 1) {
      const auto small = messenger->probe(0);
      ASSERT_NE(small, nullptr);
      finish(*small->receive(memory->data(), memory));
      const auto large = messenger->probe(0);
      ASSERT_NE(large, nullptr);
      EXPECT_EQ(large->tag(), 1);
      std::vector<std::byte> into(large->bytes());
      finish(*large->receive(into.data(), nullptr));
      EXPECT_EQ(into, std::vector<std::byte>(2 * kEagerBytes, std::byte{7}));
    }
    rendezvous.all_gather("received", "", patient());
  });
}

}  // namespace
}  // namespace tandem::comm
