#include "comm/collective_try.h"

#include "kernels/stream.h"
#include <tandem/error.h>

#include <algorithm>
#include <new>
#include <vector>

namespace tandem::comm {

namespace {

// One letter, then the agreed text or the error's.
constexpr char kDone = 'd';
constexpr char kOutOfMemory = 'm';
constexpr char kInvalid = 'i';
constexpr char kTimeout = 't';
constexpr char kDevice = 'g';
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
  } catch (const Timeout& error) {
    return kTimeout + std::string(error.what());
  } catch (const Error& error) {
    return kOther + std::string(error.what());
  } catch (const kernels::OutOfDeviceMemory& error) {
    return kOutOfMemory + std::string(error.what());
  } catch (const kernels::DeviceError& error) {
    return kDevice + std::string(error.what());
  }
  return kDone + agreed;
}

/// The first rank that failed; of those that waited in vain only if nobody failed otherwise. The
/// number of ranks if nobody failed.
std::size_t first_failed(const std::vector<std::string>& outcomes) {
  std::size_t late = outcomes.size();
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    const char letter = outcomes[rank][0];
    if (letter != kDone && letter != kTimeout) return rank;
    if (letter == kTimeout) late = std::min(late, rank);
  }
  return late;
}

}  // namespace

void try_on_all_ranks(Rendezvous& rendezvous,
                      const std::string& what,
                      const std::string& agreed,
                      Deadline deadline,
                      const std::function<void()>& attempt) {
  const auto outcomes = rendezvous.all_gather(what, outcome(agreed, attempt), deadline);
  if (const std::size_t rank = first_failed(outcomes); rank < outcomes.size()) {
    const std::string text =
        what + ": rank " + std::to_string(rank) + ": " + outcomes[rank].substr(1);
    switch (outcomes[rank][0]) {
      case kOutOfMemory:
        throw OutOfMemory(text);
      case kInvalid:
        throw InvalidArgument(text);
      case kTimeout:
        throw Timeout(text);
      case kDevice:
        throw kernels::DeviceError(text);
      default:
        throw SystemError(text);
    }
  }
  for (std::size_t rank = 1; rank < outcomes.size(); ++rank) {
    if (outcomes[rank] == outcomes[0]) continue;
    throw Mismatch(what + ": rank 0 has " + outcomes[0].substr(1) + ", rank " +
                   std::to_string(rank) + " has " + outcomes[rank].substr(1) +
                   "; every rank must make the same engines with the same options");
  }
}

}  // namespace tandem::comm
