// keyed.h: random numbers that are a pure function of a key, so that a draw belongs to a place in
// the run (seed, micro-batch, row, feature) and to no rank, thread or moment. Everything random in
// this program goes through here; that is what makes 4 ranks x 1, 2 x 2 and 1 x 4 see the same
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace code_search {

/// What a draw is for; two purposes never share a sequence.
enum class Purpose : std::uint64_t {
  kSplit = 1,
  kEpoch,
  kDropFeature,
  kStripName,
  kShuffle,
  kExamples
};

/// One step of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
/// 2014).
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

/// 64 random bits for (seed, purpose, a, b, c).
inline std::uint64_t keyed(std::uint64_t seed,
                           Purpose purpose,
                           std::uint64_t a,
                           std::uint64_t b = 0,
                           std::uint64_t c = 0) {
  std::uint64_t x = mix(seed ^ mix(static_cast<std::uint64_t>(purpose)));
  x = mix(x ^ a);
  x = mix(x ^ b);
  return mix(x ^ c);
}

/// True with probability p, decided by the key alone.
inline bool keyed_chance(double p, std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1.0p-53 < p;
}

/// A permutation of 0 .. n-1 (Fisher-Yates), decided by (seed, purpose, a).
inline std::vector<std::size_t> keyed_permutation(std::size_t n,
                                                  std::uint64_t seed,
                                                  Purpose purpose,
                                                  std::uint64_t a) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = n; i > 1; --i) {
    std::swap(order[i - 1], order[keyed(seed, purpose, a, i) % i]);
  }
  return order;
}

}  // namespace code_search
