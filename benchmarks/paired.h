// benchmarks/paired.h: a figure and the machine's limit for it, measured in turn in one run.
//
// Memory speed drifts by a fifth within minutes, so that a figure means little without its limit
// from the same seconds. Each iteration of the benchmark measures both, A B A B; the counters are
// medians:
//   figure_ms  what is measured; also Google Benchmark's own time (manual time)
//   limit_ms   of the limit; 0 if there is none
//   ratio      limit / figure, pair by pair: 1 is as fast as the limit
//   spread     interquartile range of the figure over its median
//   floor      the smallest ratio that is good enough; 0 if none is asked for
// Called by every *_bench.cpp; read by benchmarks/report.py.
#pragma once

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tandem::benchmarks {

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds that `body` takes.
template <class Body>
double timed(Body&& body) {
  const double start = seconds_now();
  std::forward<Body>(body)();
  return seconds_now() - start;
}

/// Keeps a value, and what it was computed from, from being optimised away.
template <class Value>
void keep(const Value& value) {
  benchmark::DoNotOptimize(value);
  benchmark::ClobberMemory();
}

[[nodiscard]] double quantile(std::vector<double> values, double q);
[[nodiscard]] double median(const std::vector<double>& values);

class Paired {
 public:
  explicit Paired(double floor = 0.0) : floor_(floor) {}

  /// One pair, in seconds; a limit of 0 if there is none.
  void add(benchmark::State& state, double figure, double limit);
  [[nodiscard]] double figure() const { return median(figures_); }  // seconds
  /// Median of figure - limit, pair by pair, in seconds.
  [[nodiscard]] double extra() const;
  void report(benchmark::State& state) const;

 private:
  double floor_;
  std::vector<double> figures_;
  std::vector<double> limits_;
};

/// TANDEM_BENCHMARK_QUICK in the environment shows that everything runs, on little data, and
/// measures nothing worth reading.
[[nodiscard]] bool quick();
/// The number of pairs to measure, and elements to measure them on: `wanted`, fewer when quick.
[[nodiscard]] int pairs(int wanted);
[[nodiscard]] std::int64_t elements(std::int64_t wanted);

/// A benchmark of `count` pairs. The number is fixed, so that ranks stay in step.
void add(const std::string& name, int count, std::function<void(benchmark::State&)> body);

/// What main does after its benchmarks are registered. Where not `reports` (ranks but 0), nothing
/// is printed or written. Returns the exit status.
int run(int argc, char** argv, bool reports = true);

}  // namespace tandem::benchmarks
