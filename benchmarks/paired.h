// benchmarks/paired.h: a figure and the machine's limit for it, measured in turn in one run.
//
// Memory speed drifts by a fifth within minutes, so that a figure means little without its limit
// from the same seconds. Each iteration of the benchmark measures both, A B A B; the counters are
// medians:
//   limit_ms   of the limit
//   ratio      limit / figure, pair by pair: 1 is as fast as the limit
//   spread     interquartile range of the figure over its median
// Google Benchmark's own time is the figure's (manual time).
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

namespace tandem::benchmarks {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

class Paired {
 public:
  /// One pair, in seconds.
  void add(benchmark::State& state, double figure, double limit) {
    state.SetIterationTime(figure);
    figures_.push_back(figure);
    limits_.push_back(limit);
    ratios_.push_back(limit / figure);
  }

  [[nodiscard]] double figure() const { return median(figures_); }

  void report(benchmark::State& state) const {
    state.counters["figure_ms"] = median(figures_) * 1e3;
    state.counters["limit_ms"] = median(limits_) * 1e3;
    state.counters["ratio"] = median(ratios_);
    state.counters["spread"] =
        (quantile(figures_, 0.75) - quantile(figures_, 0.25)) / median(figures_);
  }

 private:
  std::vector<double> figures_;
  std::vector<double> limits_;
  std::vector<double> ratios_;
};

/// Seconds that `body` takes.
template <class Body>
double timed(Body&& body) {
  const double start = seconds_now();
  body();
  return seconds_now() - start;
}

/// Keeps a value, and what it was computed from, from being optimised away.
template <class Value>
void keep(const Value& value) {
  benchmark::DoNotOptimize(value);
  benchmark::ClobberMemory();
}

/// The number of pairs to measure: TANDEM_BENCHMARK_QUICK in the environment asks for a few, which
/// shows that everything runs and measures nothing worth reading.
int pairs(int wanted);

}  // namespace tandem::benchmarks
