// benchmarks/paired.cpp: see paired.h.
#include "benchmarks/paired.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace tandem::benchmarks {
namespace {

class Silent : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

}  // namespace

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0.0;
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1) + 0.5)];
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

void Paired::add(benchmark::State& state, double figure, double limit) {
  state.SetIterationTime(figure);
  figures_.push_back(figure);
  limits_.push_back(limit);
}

double Paired::extra() const {
  std::vector<double> extras;
  for (std::size_t i = 0; i < figures_.size(); ++i) extras.push_back(figures_[i] - limits_[i]);
  return median(extras);
}

void Paired::report(benchmark::State& state) const {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < figures_.size(); ++i) ratios.push_back(limits_[i] / figures_[i]);
  state.counters["figure_ms"] = median(figures_) * 1e3;
  state.counters["limit_ms"] = median(limits_) * 1e3;
  state.counters["ratio"] = median(ratios);
  state.counters["spread"] =
      (quantile(figures_, 0.75) - quantile(figures_, 0.25)) / median(figures_);
  state.counters["floor"] = floor_;
}

bool quick() { return std::getenv("TANDEM_BENCHMARK_QUICK") != nullptr; }
int pairs(int wanted) { return quick() ? std::min(wanted, 2) : wanted; }
std::int64_t elements(std::int64_t wanted) {
  return quick() ? std::max<std::int64_t>(wanted / 20, 1) : wanted;
}

void add(const std::string& name, int count, std::function<void(benchmark::State&)> body) {
  benchmark::RegisterBenchmark(name.c_str(), std::move(body))
      ->UseManualTime()
      ->Iterations(pairs(count))
      ->Unit(benchmark::kMillisecond);
}

int run(int argc, char** argv, bool reports) {
  std::vector<char*> arguments;
  for (int i = 0; i < argc; ++i) {
    const bool output = std::string_view(argv[i]).substr(0, 15) == "--benchmark_out";
    if (reports || !output) arguments.push_back(argv[i]);
  }
  if (quick()) benchmark::AddCustomContext("quick", "yes");
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  Silent silent;
  if (reports) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    benchmark::RunSpecifiedBenchmarks(&silent);
  }
  benchmark::Shutdown();
  return 0;
}

}  // namespace tandem::benchmarks
