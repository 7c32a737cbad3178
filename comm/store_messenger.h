// comm/store_messenger.h: messages between ranks by way of a store, for launches without MPI.
//
// Y1 A message is cut into chunks of at most chunk_bytes. Of each chunk the receiver finds a notice
//    in its inbox: the sender takes the inbox's next number (`add`) and sets the notice under it;
//    what is larger than a notice lies under a key of its own, set before. All of it is erased when
//    it has been received.
// Y2 Per messenger and pair of ranks no more than kStoreWindow chunks lie in the store: the
//    receiver counts what it has taken, and a sender that is ahead waits for it. A message of
//    several chunks is fetched only when it is received.
// Y3 Nothing blocks: one thread a rank talks to the store, the calls only look at what it has done.
//    It asks for the inbox's number every 50 us to 5 ms, the longer nothing comes the less often.
// Y4 When the store fails (its server died), every call throws SystemError with the store's words.
// Cost: a message takes 2 trips to the server at the sender and 3 at the receiver, some 100 us each
// on one host; all data pass through the one server. Meant for the control plane and small models;
// between GPUs the data take NCCL.
// Called by comm/store_rendezvous.
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "comm/messenger.h"
#include "comm/store.h"

#include <cstddef>
#include <memory>
#include <string>

namespace tandem::comm {

inline constexpr std::size_t kStoreChunkBytes = std::size_t{1} << 20;
inline constexpr std::uint64_t kStoreWindow = 4;

/// The thread of Y3 and what it works on: one for each world and rank. When the last user is gone
/// it is given a second to hand over what was sent, such as the word of an abort, and ends.
class StoreMail;

/// `prefix`: of all keys, the same on all ranks and of no other world. `chunk_bytes` in
/// [1, kLongestStoreValue]; tests make it small.
std::shared_ptr<StoreMail> make_store_mail(std::shared_ptr<Store> store,
                                           const std::string& prefix,
                                           Group group,
                                           std::size_t chunk_bytes = kStoreChunkBytes);

/// The messenger of `space`, a number that no other messenger of this mail has had, the same on all
/// ranks.
std::unique_ptr<Messenger> make_store_messenger(std::shared_ptr<StoreMail> mail, int space);

/// Waits until everything that was sent is in the store. False when the deadline passes first.
/// Throws SystemError.
[[nodiscard]] bool flush(StoreMail& mail, Deadline deadline);

}  // namespace tandem::comm
