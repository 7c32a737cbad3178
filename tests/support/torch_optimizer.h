// tests/support/torch_optimizer.h: Tandem's optimizer settings as torch::optim has them, for
// oracles.
#pragma once

#include <tandem/optimizer.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>

namespace tandem::testing {

/// Over one parameter: its update depends on nothing else. Lion, which torch::optim lacks: its
/// paper's lines in LibTorch.
std::unique_ptr<torch::optim::Optimizer> torch_optimizer_of(const at::Tensor& parameter,
                                                            const Optimizer& settings);

}  // namespace tandem::testing
