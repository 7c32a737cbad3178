// comm/store_join.h: how processes that share a store agree on who makes up a world (V1).
//
// Keys, below kStoreKeys + "join/":
//   hello/RANK   word of the process and the world size it was told
//   list         name of a would-be world; the words of its ranks; nothing, or why it failed
//   ack/RANK     name of the list in which the process found its word
//   final        name of the list that all ranks have confirmed
//   heard/LIST   how many ranks have read why the list failed
// Called by comm/store_rendezvous.
#pragma once

#include "comm/deadline.h"
#include "comm/group.h"
#include "comm/store.h"

#include <cstdint>
#include <string>
#include <vector>

namespace tandem::comm {

/// Before every key, so that others may use the store as well.
inline constexpr const char* kStoreKeys = "tandem/";

/// The pauses of one wait (V4).
class StorePauses {
 public:
  void sleep() const;

 private:
  Clock::time_point since_ = Clock::now();
};

/// "ranks 2, 5" or "rank 2".
[[nodiscard]] std::string name_ranks(const std::vector<int>& ranks);

/// For rank 0, whose process may hold the store and end by the error that it has just published:
/// waits, two seconds at most, until `ranks` others have added 1 under `key`, and erases it.
void wait_until_heard(Store& store, const std::string& key, std::int64_t ranks);

/// The name of the new world, the same on all of its ranks. Throws Timeout, naming the ranks that
/// did not come, and SystemError.
[[nodiscard]] std::string join_world(Store& store, Group group, Deadline deadline);

}  // namespace tandem::comm
