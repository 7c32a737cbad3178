// Messengers of thread ranks here; those of processes have the same tests in processes_test.cpp.
#include "tests/comm/messages.h"

#include <gtest/gtest.h>

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
