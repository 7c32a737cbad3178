#include "comm/collective_try.h"

#include <tandem/error.h>

#include <new>

namespace tandem::comm {

namespace {

// One letter, then the agreed text or the error's.
constexpr char kDone = 'd';
constexpr char kOutOfMemory = 'm';
constexpr char kInvalid = 'i';
constexpr char kOther = 's';

std::string outcome(const std::string& agreed, const std::function<void()>& attempt) {
  try {
    attempt();
  } catch (const OutOfMemory& error) {
    return kOutOfMemory + std::string(error.what());
  } catch (const std::bad_alloc&) {
    return kOutOfMemory + std::string("the process cannot allocate memory");
  } catch (const InvalidArgument& error) {
    return kInvalid + std::string(error.what());
  } catch (const Error& error) {
    return kOther + std::string(error.what());
  }
  return kDone + agreed;
}

}  // namespace

void try_on_all_ranks(Rendezvous& rendezvous,
                      const std::string& what,
                      const std::string& agreed,
                      Deadline deadline,
                      const std::function<void()>& attempt) {
  const auto outcomes = rendezvous.all_gather(what, outcome(agreed, attempt), deadline);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank][0] == kDone) continue;
    const std::string text =
        what + ": rank " + std::to_string(rank) + ": " + outcomes[rank].substr(1);
    if (outcomes[rank][0] == kOutOfMemory) throw OutOfMemory(text);
    if (outcomes[rank][0] == kInvalid) throw InvalidArgument(text);
    throw SystemError(text);
  }
  for (std::size_t rank = 1; rank < outcomes.size(); ++rank) {
    if (outcomes[rank] == outcomes[0]) continue;
    throw Mismatch(what + ": rank 0 has " + outcomes[0].substr(1) + ", rank " +
                   std::to_string(rank) + " has " + outcomes[rank].substr(1) +
                   "; every rank must make the same engines with the same options");
  }
}

}  // namespace tandem::comm
