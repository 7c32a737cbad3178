// tests/support/nodes.h: autograd nodes whose backward does what a test tells it to do.
#pragma once

#include <torch/autograd.h>

#include <functional>

namespace tandem::testing {

/// The identity; its backward calls `action` first, which outlives the backward.
struct Intercepted : torch::autograd::Function<Intercepted> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& input,
                            const std::function<void()>* action) {
    context->saved_data["action"] = reinterpret_cast<std::int64_t>(action);
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const std::int64_t action = context->saved_data["action"].toInt();
    (*reinterpret_cast<const std::function<void()>*>(action))();
    return {gradients[0], at::Tensor()};
  }
};

inline at::Tensor intercepted(const at::Tensor& input, const std::function<void()>& action) {
  return Intercepted::apply(input, &action);
}

}  // namespace tandem::testing
