// benchmarks/gpu_bench.cpp: the update, the fold and the norm on GPU 0, each against a copy on the
// device of the same run that moves as many bytes (reads and writes). Timed by marks on the stream.
// JSON with
// --benchmark_format=json; ends with 77 where there is no GPU.
#include "benchmarks/paired.h"
#include "kernels/cuda_device.h"
#include "kernels/update.h"

#include <cstddef>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

namespace tandem::benchmarks {
namespace {

using kernels::Device;
using kernels::Dtype;
using kernels::Priority;
using kernels::Stream;

constexpr int kPairs = 11;
constexpr double kFloor = 0.95;
/// Of one measurement, so that launches and marks do not count.
constexpr int kRepeats = 5;

/// Far beyond the second-level cache: 512 MB an fp32 array.
std::int64_t numel() { return elements(std::int64_t{1} << 27); }

class Gpu {
 public:
  Gpu() : device(kernels::make_cuda_device(0)), stream(device->make_stream(Priority::kNormal)) {}

  template <class Element>
  std::shared_ptr<Element> array() {
    const std::shared_ptr<std::byte> memory =
        device->allocate(static_cast<std::size_t>(numel()) * sizeof(Element));
    return {memory, reinterpret_cast<Element*>(memory.get())};
  }
  /// Seconds on the device that one `body` takes.
  template <class Body>
  double timed(const Body& body) {
    const kernels::Mark begin = stream->record();
    for (int k = 0; k < kRepeats; ++k) body();
    const kernels::Mark end = stream->record();
    if (!end.wait_until(std::chrono::steady_clock::now() + std::chrono::minutes(1))) {
      throw std::runtime_error("a measurement took more than a minute");
    }
    return end.seconds_since(begin) / kRepeats;
  }

  const std::unique_ptr<Device> device;
  const std::unique_ptr<Stream> stream;
};

/// Pairs of `body`, which moves `bytes_per_element`, and a copy that moves as much.
template <class Body>
void against_a_copy(benchmark::State& state, Gpu& gpu, std::int64_t bytes_per_element, Body body) {
  const auto half = static_cast<std::size_t>(numel() * bytes_per_element / 2);
  const auto from = gpu.device->allocate(half);
  const auto to = gpu.device->allocate(half);
  const auto copy = [&] { gpu.device->copy(*gpu.stream, to.get(), from.get(), half); };
  static_cast<void>(gpu.timed(body));
  static_cast<void>(gpu.timed(copy));
  Paired paired(kFloor);
  for (auto _ : state) {
    const double figure = gpu.timed(body);
    paired.add(state, figure, gpu.timed(copy));
  }
  paired.report(state);
  state.counters["GB_per_s"] = static_cast<double>(bytes_per_element) *
                               static_cast<double>(numel()) / paired.figure() * 1e-9;
  state.counters["bytes_per_element"] = static_cast<double>(bytes_per_element);
}

enum class Kind : std::uint8_t { kFp32, kBf16Masters, kBf16Remainders };

void adamw(benchmark::State& state, Kind kind) {
  Gpu gpu;
  const auto grad = gpu.array<float>();
  const auto exp_avg = gpu.array<float>();
  const auto exp_avg_sq = gpu.array<float>();
  gpu.device->fill(*gpu.stream, grad.get(), 1e-3F, numel());
  kernels::UpdateArrays arrays;
  arrays.grad = grad.get();
  arrays.state = {exp_avg.get(), exp_avg_sq.get(), nullptr};
  arrays.numel = numel();
  std::shared_ptr<float> value;
  std::shared_ptr<std::uint16_t> param;
  std::shared_ptr<std::uint16_t> remainder;
  if (kind != Kind::kBf16Remainders) value = gpu.array<float>();
  if (kind == Kind::kFp32) {
    arrays.param = value.get();
  } else {
    param = gpu.array<std::uint16_t>();
    arrays.param = param.get();
    arrays.param_dtype = Dtype::kBFloat16;
    if (kind == Kind::kBf16Masters) {
      arrays.master = value.get();
    } else {
      remainder = gpu.array<std::uint16_t>();
      arrays.remainder = remainder.get();
    }
  }
  const auto table = gpu.device->make_table({arrays}, {1});
  table->set_rules(
      *gpu.stream,
      {{kernels::AdamUpdate<true, false>::at_step(1e-3, 0.9, 0.999, 1e-8, 0.01, 10, 1.0)}, {0}});
  // kernels/update.h: 12 bytes (16 with separate masters of 16-bit parameters) and 8 for each
  // state.
  against_a_copy(state, gpu, (kind == Kind::kBf16Masters ? 16 : 12) + 16,
                 [&] { table->update(*gpu.stream, 0); });
}

void fold(benchmark::State& state, int count, Dtype dtype) {
  Gpu gpu;
  std::vector<std::shared_ptr<float>> memory;
  std::vector<kernels::Slice> slices;
  for (int s = 0; s < count; ++s) {
    memory.push_back(gpu.array<float>());  // zeros, in either type
    slices.push_back({memory.back().get(), dtype});
  }
  const auto sum = gpu.array<float>();
  against_a_copy(state, gpu, count * static_cast<std::int64_t>(bytes_of(dtype)) + 4, [&] {
    gpu.device->fold(*gpu.stream, slices, numel(), sum.get(), kernels::Accumulator::kFresh);
  });
}

void norm(benchmark::State& state) {
  Gpu gpu;
  const auto grad = gpu.array<float>();
  gpu.device->fill(*gpu.stream, grad.get(), 1e-3F, numel());
  kernels::UpdateArrays arrays;
  arrays.grad = grad.get();
  arrays.param = grad.get();  // not touched by the norm
  arrays.numel = numel();
  const auto table = gpu.device->make_table({arrays}, {1});
  against_a_copy(state, gpu, 4, [&] { table->sum_squares(*gpu.stream, {true}); });
}

void register_all() {
  const auto update_of = [](const std::string& name, Kind kind) {
    add("gpu update/" + name, kPairs, [kind](benchmark::State& state) { adamw(state, kind); });
  };
  update_of("AdamW fp32", Kind::kFp32);
  update_of("AdamW bf16", Kind::kBf16Masters);
  update_of("AdamW bf16 remainders", Kind::kBf16Remainders);
  for (const int count : {2, 8}) {
    for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat32}) {
      add("gpu fold/" + std::to_string(count) + " x " + name_of(dtype) + " into fp32", kPairs,
          [count, dtype](benchmark::State& state) { fold(state, count, dtype); });
    }
  }
  add("gpu norm/fp32", kPairs, norm);
}

}  // namespace
}  // namespace tandem::benchmarks

int main(int argc, char** argv) {
  if (tandem::kernels::cuda_device_count() == 0) {
    std::puts("not run: this process sees no GPU");
    return 77;
  }
  tandem::benchmarks::register_all();
  return tandem::benchmarks::run(argc, argv);
}
