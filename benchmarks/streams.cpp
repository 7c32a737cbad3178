// benchmarks/streams.cpp: see streams.h.
#include "benchmarks/streams.h"

#include <cstring>

namespace tandem::benchmarks {
namespace {

template <int kChange, int kHalves>
void run(const Streams& streams) {
  const float* __restrict read = streams.read;
  float* __restrict c0 = streams.change[0];
  float* __restrict c1 = streams.change[1];
  float* __restrict c2 = streams.change[2];
  float* __restrict c3 = streams.change[3];
  std::uint16_t* __restrict h0 = streams.halves[0];
  std::uint16_t* __restrict h1 = streams.halves[1];
  for (std::int64_t i = 0; i < streams.numel; ++i) {
    const float value = read[i];
    if constexpr (kChange > 0) c0[i] += value;
    if constexpr (kChange > 1) c1[i] += value;
    if constexpr (kChange > 2) c2[i] += value;
    if constexpr (kChange > 3) c3[i] += value;
    if constexpr (kHalves > 0) h0[i] = static_cast<std::uint16_t>(h0[i] + 1);
    if constexpr (kHalves > 1) h1[i] = static_cast<std::uint16_t>(h1[i] + 1);
  }
}

template <int kHalves>
void run_with(const Streams& streams, int change) {
  switch (change) {
    case 0:
      return run<0, kHalves>(streams);
    case 1:
      return run<1, kHalves>(streams);
    case 2:
      return run<2, kHalves>(streams);
    case 3:
      return run<3, kHalves>(streams);
    default:
      return run<4, kHalves>(streams);
  }
}

}  // namespace

void stream(const Streams& streams) {
  int change = 0;
  while (change < 4 && streams.change[change] != nullptr) ++change;
  int halves = 0;
  while (halves < 2 && streams.halves[halves] != nullptr) ++halves;
  switch (halves) {
    case 0:
      return run_with<0>(streams, change);
    case 1:
      return run_with<1>(streams, change);
    default:
      return run_with<2>(streams, change);
  }
}

std::uint32_t read_all(const float* data, std::int64_t numel) {
  std::uint32_t sum = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, data + i, sizeof(bits));
    sum += bits;
  }
  return sum;
}

void widen(const std::uint16_t* __restrict first,
           const std::uint16_t* __restrict second,
           std::int64_t numel,
           float* __restrict result) {
  for (std::int64_t i = 0; i < numel; ++i) {
    const std::uint32_t bits = (static_cast<std::uint32_t>(first[i]) << 16U) + second[i];
    std::memcpy(result + i, &bits, sizeof(bits));
  }
}

}  // namespace tandem::benchmarks
