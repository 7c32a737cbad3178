// benchmarks/workloads.h: the models and batches whose training steps are measured.
// Called by step_bench.cpp.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tandem::benchmarks {

/// Several modules under one loss, with one fixed batch of this rank.
class Workload {
 public:
  virtual ~Workload() = default;
  [[nodiscard]] virtual std::vector<std::shared_ptr<torch::nn::Module>> modules() const = 0;
  /// `track(k, output)` is called for the output of modules()[k].
  using Track = std::function<void(std::size_t module, const torch::Tensor& output)>;
  [[nodiscard]] virtual torch::Tensor loss(const Track& track) = 0;
};

/// Two towers of `width` (512 inputs; Linear; three residual blocks LayerNorm, Linear, GELU; 128
/// outputs) and InfoNCE at temperature 0.07 over 32 rows: 20.0 M parameters at width 1720, 60.6 M
/// at 3072. The same model as benchmarks/peers/ddp.py.
std::unique_ptr<Workload> make_towers(std::int64_t width, torch::ScalarType type, int rank);

/// The model of examples/code_search on synthetic pairs of 200 hashed features a text.
std::unique_ptr<Workload> make_code_search(std::int64_t pairs, torch::ScalarType type, int rank);

}  // namespace tandem::benchmarks
