#include "comm/process_ranks.h"

#include <tandem/error.h>

#include <array>
#include <fstream>
#include <unistd.h>

namespace tandem::comm {

namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  std::array<char, 256> target{};
  const ssize_t bytes = readlink(path, target.data(), target.size());
  return bytes < 0 ? std::string() : std::string(target.data(), static_cast<std::size_t>(bytes));
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : "unknown";
}

}  // namespace

std::string host_key() {
  const std::string boot = first_line("/proc/sys/kernel/random/boot_id");
  return (boot.empty() ? host_name() : boot) + " " + link_target("/proc/self/ns/pid");
}

std::vector<std::shared_ptr<Segment>> exchange_by_address(Rendezvous& rendezvous,
                                                          const std::string& what,
                                                          const std::shared_ptr<Segment>& mine,
                                                          Deadline deadline) {
  const auto [my_rank, size] = rendezvous.group();
  const auto addresses = rendezvous.all_gather(what, mine->address().text(), deadline);
  std::vector<std::shared_ptr<Segment>> segments;
  std::string failure;
  try {
    for (int rank = 0; rank < size; ++rank) {
      if (rank == my_rank || !rendezvous.nodes().together(rank, my_rank)) {
        segments.push_back(rank == my_rank ? mine : nullptr);
        continue;
      }
      segments.push_back(
          Segment::open("of rank " + std::to_string(rank),
                        Segment::Address::parse(addresses[static_cast<std::size_t>(rank)])));
    }
  } catch (const Error& error) {
    failure = "rank " + std::to_string(my_rank) + ": " + error.what();
  }
  // Also says that all ranks have mapped what they need, before anybody may go on and end.
  for (const std::string& text : rendezvous.all_gather(what, failure, deadline)) {
    if (!text.empty()) throw SystemError(std::string(what).append(": ").append(text));
  }
  return segments;
}

}  // namespace tandem::comm
