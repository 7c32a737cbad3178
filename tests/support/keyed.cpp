// tests/support/keyed.cpp: see keyed.h.
#include "tests/support/keyed.h"

#include <torch/types.h>

#include <initializer_list>

namespace tandem::testing {
namespace {

/// SplitMix64 (Steele, Lea and Flood, 2014): one well-mixed word of a counter.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

at::Tensor keyed(at::IntArrayRef shape, std::uint64_t key, double scale) {
  at::Tensor values = torch::empty(shape, torch::kFloat32);
  float* data = values.data_ptr<float>();
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const std::uint64_t word = mixed(mixed(key) + static_cast<std::uint64_t>(i));
    const double unit = static_cast<double>(word >> 40) / static_cast<double>(1 << 24);
    data[i] = static_cast<float>(scale * (2.0 * unit - 1.0));
  }
  return values;
}

std::uint64_t key_of(std::initializer_list<std::int64_t> parts) {
  std::uint64_t key = 0;
  for (const std::int64_t part : parts) {
    key = mixed(key ^ static_cast<std::uint64_t>(part));
  }
  return key;
}

}  // namespace tandem::testing
