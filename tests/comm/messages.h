// What every messenger does, for threads and for processes.
#pragma once

#include "comm/messenger.h"
#include "tests/comm/thread_ranks.h"

#include <memory>
#include <vector>

namespace tandem::comm {

inline void finish(Transfer& transfer) {
  const Deadline deadline = patient();
  while (!transfer.done()) {
    ASSERT_FALSE(deadline.passed());
    std::this_thread::yield();
  }
}

inline std::unique_ptr<Arrival> next(Messenger& messenger, int from) {
  const Deadline deadline = patient();
  for (;;) {
    if (auto arrival = messenger.probe(from)) return arrival;
    if (deadline.passed()) throw std::runtime_error("no message");
    std::this_thread::yield();
  }
}

/// Every rank sends to every other messages of 0, 1, odd and many bytes, all at once, and receives
/// the others'; half of the ranks by name, half as they come.
inline void exchange_messages_of_all_sizes(Messenger& messenger, Group group, std::size_t many) {
  const std::vector<std::size_t> sizes{0, 1, 7, many, 3, many + 1, 2 * many, 0, many - 1};
  const auto byte = [&](int rank, std::size_t message, std::size_t i) {
    return static_cast<std::byte>(static_cast<std::size_t>(rank) * 31 + message * 7 + i);
  };
  std::vector<std::unique_ptr<Transfer>> sending;
  for (int to = 0; to < group.size; ++to) {
    if (to == group.rank) continue;
    for (std::size_t m = 0; m < sizes.size(); ++m) {
      const auto memory = std::make_shared<std::vector<std::byte>>(sizes[m]);
      for (std::size_t i = 0; i < sizes[m]; ++i) (*memory)[i] = byte(group.rank, m, i);
      sending.push_back(
          messenger.send(to, static_cast<int>(m), memory->data(), memory->size(), memory));
    }
  }
  std::vector<std::size_t> received(static_cast<std::size_t>(group.size));
  const auto take = [&](int from) {
    const auto arrival = next(messenger, from);
    std::size_t& count = received[static_cast<std::size_t>(arrival->from())];
    ASSERT_LT(count, sizes.size());
    EXPECT_EQ(arrival->tag(), static_cast<int>(count));
    ASSERT_EQ(arrival->bytes(), sizes[count]);
    std::vector<std::byte> into(arrival->bytes());
    finish(*arrival->receive(into.data(), nullptr));
    for (std::size_t i = 0; i < into.size(); ++i) {
      ASSERT_EQ(into[i], byte(arrival->from(), count, i)) << "message " << count;
    }
    ++count;
    for (const auto& transfer : sending) static_cast<void>(transfer->done());
  };
  for (int other = 0; other < group.size; ++other) {
    if (other == group.rank) continue;
    for (std::size_t m = 0; m < sizes.size(); ++m) take(group.rank % 2 == 0 ? other : kAnyRank);
  }
  for (const auto& transfer : sending) finish(*transfer);
  EXPECT_EQ(messenger.probe(kAnyRank), nullptr);
}

/// Ranks 0 and 1, if there are two, send each other one message on each of two messengers.
inline void tell_two_messengers_apart(Rendezvous& rendezvous) {
  const auto first = rendezvous.make_messenger("first", patient());
  const auto second = rendezvous.make_messenger("second", patient());
  const int rank = rendezvous.group().rank;
  if (rank < 2 && rendezvous.group().size > 1) {
    const std::byte a{1};
    const std::byte b{2};
    const auto send_a = first->send(1 - rank, 0, &a, 1, nullptr);
    const auto send_b = second->send(1 - rank, 0, &b, 1, nullptr);
    std::byte got_a{};
    std::byte got_b{};
    finish(*next(*second, 1 - rank)->receive(&got_b, nullptr));
    finish(*next(*first, 1 - rank)->receive(&got_a, nullptr));
    EXPECT_EQ(got_a, a);
    EXPECT_EQ(got_b, b);
    finish(*send_a);
    finish(*send_b);
  }
  rendezvous.all_gather("the end", "", patient());
}

}  // namespace tandem::comm
