// comm/mailbox_messenger.h: messages between ranks that are threads of one process.
//
// What MPI may do, this does on purpose: a message of more than kEagerBytes stays in the sender's
// memory until the receiver takes it, so that staging which is reused too early shows as a data
// race; and with delays each message is delivered, and each receive is done, some pseudo-random
// time later.
// Called by comm/thread_rendezvous.
#pragma once

#include "comm/messenger.h"

#include <cstdint>
#include <memory>

namespace tandem::comm {

/// Test instrument: pauses of 0..max_us before a message can be found and before it is received,
/// keyed by seed, ranks and the message's number.
struct MessageDelays {
  std::uint64_t seed = 0;
  std::int64_t max_us = 0;  // 0: none
};

class MailboxOffice;

inline constexpr std::size_t kEagerBytes = 512;

/// What the messengers of one space share.
std::shared_ptr<MailboxOffice> make_mailbox_office(int size, MessageDelays delays);
std::unique_ptr<Messenger> make_mailbox_messenger(std::shared_ptr<MailboxOffice> office, int rank);

}  // namespace tandem::comm
