// tests/hooks/recording_sink.h: a sink that writes down its events, and the graphs that the tests
// of hooks/ share.
//
// All leaves are vectors of two equal elements, so a gradient is told by one number.
#pragma once

#include "hooks/pass_tracker.h"
#include <tandem/error.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tandem::hooks {

using Events = std::vector<std::string>;

class RecordingSink : public PassSink {
 public:
  /// Called after an event was written down; may throw, as the sink may. Not for abandoned().
  std::function<void(const std::string&)> after;

  void opened() override { record("opened"); }
  void reached(std::int32_t engine) override { record("reached " + std::to_string(engine)); }
  void arrived(std::int32_t engine, std::int32_t parameter, at::Tensor gradient) override {
    gradients.push_back(gradient);
    record("arrived " + std::to_string(engine) + "." + std::to_string(parameter));
  }
  void closed() override { record("closed"); }
  void abandoned() noexcept override {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.emplace_back("abandoned");
  }

  [[nodiscard]] Events events() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return events_;
  }
  /// The events since the last call.
  Events take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
  }

  std::vector<at::Tensor> gradients;

 private:
  void record(const std::string& event) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      events_.push_back(event);
    }
    if (after) after(event);
  }

  mutable std::mutex mutex_;
  Events events_;
};

inline at::Tensor leaf(double value) {
  return torch::full({2}, value, torch::TensorOptions().requires_grad(true));
}

inline double value_of(const at::Tensor& tensor) { return tensor[0].item<double>(); }

struct TestError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::function<void(const std::string&)> throw_at(const std::string& event) {
  return [event](const std::string& now) {
    if (now == event) throw TestError("thrown in " + event);
  };
}

/// The identity; `during_backward` runs where its gradient passes, inside the graph task.
inline at::Tensor detour(const at::Tensor& input, std::function<void()> during_backward) {
  const at::Tensor output = input * 1.0;
  output.register_hook([run = std::move(during_backward)](const at::Tensor&) { run(); });
  return output;
}

using Segment = std::function<at::Tensor(const at::Tensor&)>;

/// Activation checkpointing by a nested backward pass, as PyTorch's reentrant variant does it.
class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx,
                            const at::Tensor& input,
                            const Segment* segment) {
    ctx->save_for_backward({input});
    ctx->saved_data["segment"] = reinterpret_cast<std::int64_t>(segment);
    return (*segment)(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const auto* segment = reinterpret_cast<const Segment*>(ctx->saved_data["segment"].toInt());
    const torch::AutoGradMode with_grad(true);
    const at::Tensor input = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    torch::autograd::backward({(*segment)(input)}, {grads[0]});
    return {input.grad(), at::Tensor()};
  }
};

/// `segment` must live until the last backward pass.
inline at::Tensor checkpoint(const Segment& segment, const at::Tensor& input) {
  return Checkpoint::apply(input, &segment);
}

}  // namespace tandem::hooks
