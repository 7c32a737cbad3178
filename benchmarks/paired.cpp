#include "benchmarks/paired.h"

#include <cstdlib>

namespace tandem::benchmarks {

int pairs(int wanted) {
  return std::getenv("TANDEM_BENCHMARK_QUICK") == nullptr ? wanted : std::min(wanted, 2);
}

}  // namespace tandem::benchmarks
