// benchmarks/streams.h: memory traffic without arithmetic worth mentioning, the limit that kernels
// are measured against: the same arrays read and written once, one addition an element. Compiled
// for this machine (-march=native).
#pragma once

#include <cstdint>

namespace tandem::benchmarks {

struct Streams {
  const float* read = nullptr;    // read only
  float* change[4] = {};          // read and written; null from the first unused one on
  std::uint16_t* halves[2] = {};  // read and written 16-bit arrays; likewise
  std::int64_t numel = 0;
};

void stream(const Streams& streams);

/// Sum of the bits of `numel` numbers: reads them and nothing else.
std::uint32_t read_all(const float* data, std::int64_t numel);

/// Reads two 16-bit arrays and writes a 32-bit one: the streams of a fold of two slices.
void widen(const std::uint16_t* first,
           const std::uint16_t* second,
           std::int64_t numel,
           float* result);

}  // namespace tandem::benchmarks
