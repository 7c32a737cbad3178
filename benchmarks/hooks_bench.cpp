// benchmarks/hooks_bench.cpp: what an engine adds to a backward pass and what a step costs, per
// parameter and per bucket, in models of many scalars on one rank: nothing but the fixed costs.
//
// The limit is the plain backward pass of the same graph. extra_ns is the difference over the
// number of parameters: it must not grow with that number.
#include "benchmarks/paired.h"
#include <tandem/tandem.h>

#include <torch/torch.h>

#include <algorithm>

namespace tandem::benchmarks {
namespace {

constexpr int kPairs = 15;

NamedTensors scalars(std::int64_t count) {
  NamedTensors tensors;
  for (std::int64_t i = 0; i < count; ++i) {
    tensors.push_back({"p" + std::to_string(i), torch::ones({}).requires_grad_()});
  }
  return tensors;
}

torch::Tensor loss_of(const NamedTensors& tensors) {
  std::vector<torch::Tensor> all;
  all.reserve(tensors.size());
  for (const NamedTensor& named : tensors) all.push_back(named.tensor);
  return torch::stack(all).sum();
}

void backward(benchmark::State& state, World& world, std::int64_t count, bool bucket_each) {
  const NamedTensors plain = scalars(count);
  const NamedTensors wrapped = scalars(count);
  EngineOptions options;
  options.name = "scalars";
  if (bucket_each) options.bucket_bytes = 1;
  const Engine engine(world, wrapped, options);
  std::vector<double> steps;
  Paired paired;
  const auto pair = [&](bool counted) {
    const torch::Tensor with = loss_of(wrapped);
    const double figure = timed([&] { with.backward(); });
    const double step = timed([&] { world.step(); });
    const torch::Tensor without = loss_of(plain);
    const double limit = timed([&] { without.backward(); });
    for (const NamedTensor& named : plain) named.tensor.mutable_grad() = torch::Tensor();
    if (!counted) return;
    paired.add(state, figure, limit);
    steps.push_back(step);
  };
  pair(false);
  for (auto _ : state) pair(true);
  paired.report(state);
  const auto per = static_cast<double>(count);
  state.counters["parameters"] = per;
  state.counters["buckets"] = static_cast<double>(engine.buckets());
  state.counters["extra_ns"] = paired.extra() / per * 1e9;
  state.counters["step_ns"] = median(steps) / per * 1e9;
}

void register_all(World& world) {
  for (const bool bucket_each : {false, true}) {
    for (const std::int64_t wanted : {100, 1'000, 10'000, 100'000}) {
      if (bucket_each && wanted > 10'000) continue;
      const std::int64_t count = quick() ? std::min<std::int64_t>(wanted, 1'000) : wanted;
      add((bucket_each ? "hooks/a bucket each/" : "hooks/") + std::to_string(wanted) +
              " parameters",
          wanted > 10'000 ? 7 : kPairs,
          [=, &world](benchmark::State& state) { backward(state, world, count, bucket_each); });
    }
  }
}

}  // namespace
}  // namespace tandem::benchmarks

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::AddCustomContext("libtorch", TORCH_VERSION);
  tandem::World world = tandem::World::from_environment();
  tandem::benchmarks::register_all(world);
  return tandem::benchmarks::run(argc, argv, world.rank() == 0);
}
