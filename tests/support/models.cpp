// tests/support/models.cpp: see models.h.
#include "tests/support/models.h"

#include "engine/gpu.h"
#include "tests/support/keyed.h"

#include <torch/nn/functional/linear.h>
#include <torch/types.h>

#include <cstdlib>
#include <stdexcept>
#include <unordered_set>
#include <utility>

namespace tandem::testing {

void fill(torch::nn::Module& module, std::uint64_t key) {
  const at::NoGradGuard no_grad;
  std::int64_t place = 0;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.copy_(
        keyed(parameter.sizes(), key_of({static_cast<std::int64_t>(key), place++}), 0.4));
  }
}

Mlp::Mlp(std::int64_t inputs,
         std::int64_t hidden,
         std::int64_t outputs,
         std::uint64_t key,
         at::ScalarType dtype) {
  first = register_module("first", torch::nn::Linear(inputs, hidden));
  second = register_module("second", torch::nn::Linear(hidden, outputs));
  fill(*this, key);
  to(dtype);
}

at::Tensor Mlp::forward(const at::Tensor& input) {
  return second(torch::tanh(first(input.to(first->weight.scalar_type()))));
}

std::shared_ptr<Mlp> mlp(std::uint64_t key, at::ScalarType dtype) {
  return std::make_shared<Mlp>(8, 16, 8, key, dtype);
}

Scale::Scale(std::int64_t numel, double value, at::ScalarType dtype) {
  w = register_parameter("w", torch::full({numel}, value, dtype));
}

at::Tensor Scale::forward(const at::Tensor& input) { return w * input.to(w.scalar_type()); }

NamedTensors Net::parameters() const {
  if (!tower) {
    return tensors;
  }
  NamedTensors parameters;
  for (const auto& item : tower->named_parameters()) {
    parameters.push_back({item.key(), item.value()});
  }
  return parameters;
}

at::Tensor Net::parameter(const std::string& name) const {
  for (const NamedTensor& parameter : parameters()) {
    if (parameter.name == name) {
      return parameter.tensor;
    }
  }
  throw std::out_of_range("no parameter " + name);
}

Net net_of(std::shared_ptr<Tower> tower) {
  return {tower, {}, [tower](const at::Tensor& input) { return tower->forward(input); }};
}

Net net_of(NamedTensors tensors) {
  return {nullptr, std::move(tensors), [](const at::Tensor& input) { return input; }};
}

at::Device test_device() {
  const char* const name = std::getenv("TANDEM_TEST_DEVICE");
  if (name == nullptr || std::string(name) == "cpu") {
    return at::kCPU;
  }
  if (std::string(name) != "cuda") {
    throw std::runtime_error(std::string("TANDEM_TEST_DEVICE is '") + name +
                             "'; it is cpu or cuda");
  }
  return {at::kCUDA, static_cast<at::DeviceIndex>(engine::gpu_of_local_rank(0))};
}

Nets on_test_device(Nets nets) {
  for (const at::Tensor& parameter : unique_parameters(nets)) {
    at::Tensor(parameter).set_data(parameter.detach().to(test_device()));
  }
  return nets;
}

std::vector<at::Tensor> unique_parameters(const Nets& nets) {
  std::vector<at::Tensor> parameters;
  std::unordered_set<const void*> known;
  for (const Net& net : nets) {
    for (const NamedTensor& parameter : net.parameters()) {
      if (known.insert(parameter.tensor.unsafeGetTensorImpl()).second) {
        parameters.push_back(parameter.tensor);
      }
    }
  }
  return parameters;
}

}  // namespace tandem::testing
