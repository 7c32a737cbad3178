#include "comm/control_plane.h"

#include <tandem/error.h>

#include <algorithm>

namespace tandem::comm {

namespace {

template <typename T, typename Op>
void merge_section(const char* name, std::vector<T>& mine, const std::vector<T>& other, Op op) {
  if (mine.size() != other.size()) {
    throw Mismatch("messages of one round differ in their " + std::string(name) + ": " +
                   std::to_string(mine.size()) + " words against " + std::to_string(other.size()) +
                   "; do all ranks have the same engines?");
  }
  std::transform(mine.begin(), mine.end(), other.begin(), mine.begin(), op);
}

}  // namespace

void Message::merge(const Message& other) {
  const auto least = [](std::uint64_t a, std::uint64_t b) { return std::min(a, b); };
  const auto most = [](std::uint64_t a, std::uint64_t b) { return std::max(a, b); };
  // By way of unsigned words: a sum that wraps must not be undefined.
  const auto sum = [](std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  };
  merge_section("ors", ors, other.ors, [](std::uint64_t a, std::uint64_t b) { return a | b; });
  merge_section("mins", mins, other.mins, least);
  merge_section("maxs", maxs, other.maxs, most);
  merge_section("sums", sums, other.sums, sum);
}

}  // namespace tandem::comm
