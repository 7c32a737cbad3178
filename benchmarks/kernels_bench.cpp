// benchmarks/kernels_bench.cpp: the update of every optimizer and the norm, on one thread, against
// the same memory streams without arithmetic.
#include "benchmarks/paired.h"
#include "benchmarks/streams.h"
#include "kernels/norm.h"
#include "kernels/superaccumulator.h"
#include "kernels/update.h"
#include "zero/stream_array.h"
#include "zero/update_rule.h"
#include <tandem/optimizer.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <vector>

namespace tandem::benchmarks {
namespace {

using zero::StreamArray;

constexpr std::int64_t kNumel = 20'000'000;

enum class Kind : std::uint8_t { kFp32, kBf16, kBf16Remainder, kFp16 };

void fill(StreamArray<float>& array, float value) {
  std::fill_n(array.data(), array.numel(), value);
}

void update(benchmark::State& state, const Optimizer& optimizer, Kind kind) {
  const int states = zero::states_of(optimizer);
  StreamArray<float> grad(kNumel);
  StreamArray<float> value(kNumel);  // fp32 parameter or master
  StreamArray<std::uint16_t> half(kNumel);
  StreamArray<std::uint16_t> remainder(kNumel);
  std::array<StreamArray<float>, kernels::kMaxStates> state_arrays;
  fill(grad, 1e-3F);
  for (int k = 0; k < states; ++k) {
    state_arrays[static_cast<std::size_t>(k)] = StreamArray<float>(kNumel);
  }

  kernels::UpdateArrays arrays;
  Streams streams;
  arrays.grad = streams.read = grad.data();
  arrays.numel = streams.numel = kNumel;
  std::int64_t bytes = 4;
  int change = 0;
  if (kind == Kind::kFp32) {
    arrays.param = value.data();
  } else {
    arrays.param = streams.halves[0] = half.data();
    arrays.param_dtype = kind == Kind::kFp16 ? kernels::Dtype::kFloat16 : kernels::Dtype::kBFloat16;
    bytes += 4;
  }
  if (kind == Kind::kBf16Remainder) {
    arrays.remainder = streams.halves[1] = remainder.data();
    bytes += 4;
  } else {
    streams.change[change++] = value.data();
    if (kind != Kind::kFp32) arrays.master = value.data();
    bytes += 8;
  }
  for (int k = 0; k < states; ++k) {
    float* const data = state_arrays[static_cast<std::size_t>(k)].data();
    arrays.state[static_cast<std::size_t>(k)] = streams.change[change++] = data;
    bytes += 8;
  }

  Paired paired;
  std::int64_t step = 0;
  for (auto _ : state) {
    const kernels::Update rule = zero::update_at(optimizer, ++step, 0.5);
    const double figure = timed([&] { kernels::update(rule, arrays); });
    // What the limit writes is no number that an update should meet: restored for the next round.
    const double limit = timed([&] { stream(streams); });
    paired.add(state, figure, limit);
    state.PauseTiming();
    fill(value, 0.0F);
    std::fill_n(half.data(), half.numel(), std::uint16_t{0});
    std::fill_n(remainder.data(), remainder.numel(), std::uint16_t{0});
    for (int k = 0; k < states; ++k) fill(state_arrays[static_cast<std::size_t>(k)], 0.5F);
    state.ResumeTiming();
  }
  paired.report(state);
  const double element = paired.figure() / static_cast<double>(kNumel);
  state.counters["ns_per_element"] = element * 1e9;
  state.counters["GB_per_s"] = static_cast<double>(bytes) / element * 1e-9;
  state.counters["bytes_per_element"] = static_cast<double>(bytes);
}

void norm(benchmark::State& state) {
  StreamArray<float> data(kNumel);
  fill(data, 1e-3F);
  Paired paired;
  for (auto _ : state) {
    const double figure = timed([&] {
      kernels::Superaccumulator sum;
      kernels::add_sum_of_squares(data.data(), data.numel(), sum);
      keep(sum);
    });
    const double limit = timed([&] { keep(read_all(data.data(), data.numel())); });
    paired.add(state, figure, limit);
  }
  paired.report(state);
  state.counters["GB_per_s"] = 4.0 * static_cast<double>(kNumel) / paired.figure() * 1e-9;
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Iterations(pairs(15))
      ->Unit(benchmark::kMillisecond);
}

void register_all() {
  const auto update_of = [](const std::string& name, const Optimizer& optimizer, Kind kind) {
    add("update/" + name,
        [optimizer, kind](benchmark::State& state) { update(state, optimizer, kind); });
  };
  update_of("AdamW fp32", AdamW{}, Kind::kFp32);
  update_of("AdamW bf16", AdamW{}, Kind::kBf16);
  update_of("AdamW bf16 remainders", AdamW{}, Kind::kBf16Remainder);
  update_of("AdamW fp16", AdamW{}, Kind::kFp16);
  update_of("AdamW amsgrad fp32", AdamW{.amsgrad = true}, Kind::kFp32);
  update_of("Adam fp32", Adam{}, Kind::kFp32);
  update_of("Sgd fp32", Sgd{}, Kind::kFp32);
  update_of("Sgd momentum fp32", Sgd{.momentum = 0.9}, Kind::kFp32);
  update_of("RmsProp fp32", RmsProp{}, Kind::kFp32);
  update_of("Adagrad fp32", Adagrad{}, Kind::kFp32);
  update_of("Lion fp32", Lion{}, Kind::kFp32);
  update_of("Lion bf16", Lion{}, Kind::kBf16);
  add("norm/fp32", norm);
}

}  // namespace
}  // namespace tandem::benchmarks

int main(int argc, char** argv) {
  tandem::benchmarks::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
