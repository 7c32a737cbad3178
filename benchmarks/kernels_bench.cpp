// benchmarks/kernels_bench.cpp: the update of every optimizer, the norm and the fold, on one
// thread, against the same memory streams without arithmetic.
#include "benchmarks/paired.h"
#include "benchmarks/stream_array.h"
#include "benchmarks/streams.h"
#include "kernels/fold.h"
#include "kernels/norm.h"
#include "kernels/superaccumulator.h"
#include "kernels/update.h"
#include "zero/update_rule.h"
#include <tandem/optimizer.h>

#include <algorithm>
#include <array>

namespace tandem::benchmarks {
namespace {

constexpr int kPairs = 11;
constexpr double kUpdateFloor = 0.95;
constexpr double kNormFloor = 0.9;

std::int64_t numel() { return elements(20'000'000); }

template <class Number>
void fill(const kernels::DeviceArray<Number>& array, Number value) {
  std::fill_n(array.data(), array.numel(), value);
}

enum class Kind : std::uint8_t { kFp32, kBf16, kBf16Remainder, kFp16 };

void update(benchmark::State& state, const Optimizer& optimizer, Kind kind) {
  const auto states = static_cast<std::size_t>(zero::states_of(optimizer));
  const auto grad = stream_array<float>(numel());
  const auto value = stream_array<float>(kind == Kind::kBf16Remainder ? 0 : numel());  // or master
  const auto half = stream_array<std::uint16_t>(kind == Kind::kFp32 ? 0 : numel());
  const auto remainder = stream_array<std::uint16_t>(kind == Kind::kBf16Remainder ? numel() : 0);
  std::array<kernels::DeviceArray<float>, kernels::kMaxStates> state_arrays;
  for (std::size_t k = 0; k < states; ++k) state_arrays[k] = stream_array<float>(numel());
  fill(grad, 1e-3F);
  // What the limit leaves behind is no number that an update should meet, and what one of the two
  // leaves in the caches would favour the other: both find the arrays just written.
  const auto reset = [&] {
    fill(value, 0.0F);
    fill<std::uint16_t>(half, 0);
    fill<std::uint16_t>(remainder, 0);
    for (const auto& array : state_arrays) fill(array, 0.5F);
  };

  kernels::UpdateArrays arrays;
  Streams streams;
  arrays.grad = streams.read = grad.data();
  arrays.numel = streams.numel = numel();
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
  for (std::size_t k = 0; k < states; ++k) {
    arrays.state[k] = streams.change[change++] = state_arrays[k].data();
    bytes += 8;
  }

  Paired paired(kUpdateFloor);
  std::int64_t step = 0;
  for (auto _ : state) {
    const kernels::Update rule = zero::update_at(optimizer, ++step, 0.5);
    reset();
    const double figure = timed([&] { kernels::update(rule, arrays); });
    reset();
    const double limit = timed([&] { stream(streams); });
    paired.add(state, figure, limit);
  }
  paired.report(state);
  const double element = paired.figure() / static_cast<double>(numel());
  state.counters["ns_per_element"] = element * 1e9;
  state.counters["GB_per_s"] = static_cast<double>(bytes) / element * 1e-9;
  state.counters["bytes_per_element"] = static_cast<double>(bytes);
}

void norm(benchmark::State& state) {
  const auto data = stream_array<float>(numel());
  fill(data, 1e-3F);
  Paired paired(kNormFloor);
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
  state.counters["GB_per_s"] = 4e-9 * static_cast<double>(numel()) / paired.figure();
}

void fold_two(benchmark::State& state) {
  const auto first = stream_array<std::uint16_t>(numel());
  const auto second = stream_array<std::uint16_t>(numel());
  const auto sum = stream_array<float>(numel());
  fill<std::uint16_t>(first, 0x3F80);  // 1.0
  fill<std::uint16_t>(second, 0x4000);
  const std::array<kernels::Slice, 2> slices{
      kernels::Slice{first.data(), kernels::Dtype::kBFloat16},
      kernels::Slice{second.data(), kernels::Dtype::kBFloat16}};
  Paired paired;
  for (auto _ : state) {
    fill(sum, 0.0F);
    const double figure =
        timed([&] { kernels::fold(slices, numel(), sum.data(), kernels::Accumulator::kFresh); });
    fill(sum, 0.0F);
    const double limit = timed([&] { widen(first.data(), second.data(), numel(), sum.data()); });
    paired.add(state, figure, limit);
  }
  paired.report(state);
  state.counters["GB_per_s"] = 8e-9 * static_cast<double>(numel()) / paired.figure();
}

void register_all() {
  const auto update_of = [](const std::string& name, const Optimizer& optimizer, Kind kind) {
    add("update/" + name, kPairs,
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
  add("norm/fp32", 2 * kPairs, norm);
  add("fold/2 x bf16 into fp32", 2 * kPairs, fold_two);
}

}  // namespace
}  // namespace tandem::benchmarks

int main(int argc, char** argv) {
  tandem::benchmarks::register_all();
  return tandem::benchmarks::run(argc, argv);
}
